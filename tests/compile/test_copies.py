"""Backends that live at a time have copies of the kernels of their own."""

from __future__ import annotations

from pathlib import Path

from kestrel.cuda.copies import Copy


def test_copies_that_are_held_are_different(tmp_path: Path) -> None:
    file = tmp_path / "head-1234.cubin"
    file.write_bytes(b"code")
    copies = [Copy() for _ in range(4)]
    paths = [copy.path(file) for copy in copies]
    assert len(set(paths)) == 4
    assert all(Path(path).samefile(file) for path in paths)
    for copy in copies:
        copy.release()


def test_a_copy_that_was_given_back_is_taken_again() -> None:
    first, second, third = Copy(), Copy(), Copy()
    second.release()
    again = Copy()
    assert again.number == second.number
    second.release()  # it no longer holds any
    other = Copy()
    assert other.number not in (first.number, again.number, third.number)
    for copy in (first, again, third, other):
        copy.release()
