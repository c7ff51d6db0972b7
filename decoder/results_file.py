"""The results of a batch job: a JSON line each, appended whole, so that a kill at any moment costs at most one.

One write call appends a line with its end. Where the machine stops in the middle of one, the torn end is cut off when
the file is opened again.
"""

import fcntl
import json
import os
from pathlib import Path
from typing import Any, Self

LineId = str | int

_BEGIN = b'{"line": '


class ResultsFile:
    """Open for appending, and locked: one job a file. ``num_done`` and ``num_failed`` cover what was there before, too.

    A line is known by its id where it has one, else by its number. Raises ValueError for a file that holds anything
    but results, which is left as it is.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.numbers: set[int] = set()  # of lines without an id
        self.ids: set[LineId] = set()
        self.num_failed = 0
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(self._file, self._read())
        except BlockingIOError:
            os.close(self._file)
            raise ValueError(f"another job writes to {path}") from None
        except BaseException:
            os.close(self._file)
            raise

    @property
    def num_done(self) -> int:
        """Lines with a result or an error."""
        return len(self.numbers) + len(self.ids)

    def has(self, number: int, line_id: LineId | None) -> bool:
        """This line is done."""
        return number in self.numbers if line_id is None else line_id in self.ids

    def append(self, number: int, line_id: LineId | None, fields: dict[str, Any]) -> None:
        """Write one line's result, or its ``error``; dataclasses become objects of their fields."""
        record = {"line": number, **({} if line_id is None else {"id": line_id}), **fields}
        # `asdict` would copy every token first, which takes longer than all the rest.
        left = json.dumps(record, default=vars).encode() + b"\n"
        try:
            while left:
                left = left[os.write(self._file, left) :]
        except OSError as error:  # a full disk, say; which, the system does not
            error.filename = str(self._path)
            raise
        self._note(record)

    def close(self) -> None:
        """Leave nothing to the system's cache."""
        os.fsync(self._file)
        os.close(self._file)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _note(self, record: dict[str, Any]) -> None:
        if record.get("id") is None:
            self.numbers.add(record["line"])
        else:
            self.ids.add(record["id"])
        self.num_failed += "error" in record

    def _read(self) -> int:
        """Note what is done; returns the bytes up to the last whole line."""
        whole = 0
        with self._path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                is_ours = line[: len(_BEGIN)] == _BEGIN[: len(line)]
                if is_ours and not line.endswith(b"\n"):
                    break
                record = _parsed(line) if is_ours else None
                if record is None:
                    raise ValueError(f"line {number} of {self._path} is no result of a batch job: name another file")
                self._note(record)
                whole += len(line)
        return whole


def _parsed(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    is_result = isinstance(record, dict) and isinstance(record.get("line"), int)
    return record if is_result and isinstance(record.get("id"), LineId | None) else None
