"""Names for people: file and member names that cannot play tricks on a terminal."""

LONGEST_NAME = 300


def harmless(name: str) -> str:
    """Without control characters, text direction marks and halves of surrogate pairs; very long ones are cut."""
    name = "".join(char if char.isprintable() else "\ufffd" for char in name)
    return name if len(name) <= LONGEST_NAME else f"{name[:LONGEST_NAME]}..."
