"""A seeded fuzzer over all verbs: damaged inputs and strange arguments must give a result or one line."""
