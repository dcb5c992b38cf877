"""A pseudo-terminal that records what is written to it, and the lines that a user would see."""

import fcntl
import os
import pty
import re
import select
import struct
import termios
import time

PIECES = re.compile(r"\x1b\[([0-9;?]*)([A-Za-z])|([^\x1b])")


class Terminal:
    """A pseudo-terminal of a given size; the process under test writes to the descriptor `theirs`."""

    def __init__(self, columns: int, rows: int) -> None:
        self._ours, self.theirs = pty.openpty()
        self.seen = ""
        self.resize(columns, rows)

    def resize(self, columns: int, rows: int) -> None:
        fcntl.ioctl(self.theirs, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def read(self, seconds: float = 0.0) -> str:
        """Read all available output, after waiting up to `seconds` for the first of it, and return it."""
        new = b""
        try:
            while select.select([self._ours], [], [], seconds if not new else 0.02)[0]:
                new += os.read(self._ours, 65536)
        except OSError:  # raised on Linux when the other end is closed
            pass
        text = new.decode()
        self.seen += text
        return text

    def wait_for(self, pattern: str, seconds: float = 240.0) -> None:
        deadline = time.monotonic() + seconds
        while not re.search(pattern, self.seen):
            assert time.monotonic() < deadline, f"{pattern} was not seen in {self.seen}"
            self.read(0.1)

    def close(self) -> None:
        os.close(self._ours)
        os.close(self.theirs)


def lines_on_screen(seen: str) -> list[str]:
    """Return the lines that remain after erasing and overwriting, as on a screen of unlimited height."""
    lines, row, column = [""], 0, 0
    for match in PIECES.finditer(seen):
        argument, command, character = match.groups()
        if command == "A":
            row = max(0, row - int(argument or 1))
        elif command == "J":
            lines[row:] = [lines[row][:column]]
        elif command == "K":
            lines[row] = lines[row][:column]
        elif command is not None:
            assert command == "m", f"what does {match.group()!r} do?"
        elif character == "\r":
            column = 0
        elif character == "\n":
            row += 1
            lines += [""] * (row + 1 - len(lines))
        else:
            lines[row] = f"{lines[row][:column]:<{column}}{character}{lines[row][column + 1 :]}"
            column += 1
    return [line.rstrip() for line in lines]
