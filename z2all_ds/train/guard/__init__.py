"""Steps that go wrong: how they are recognised, and what the run does about them."""
