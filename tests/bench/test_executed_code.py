"""How much of its code a kernel goes through: what is read from a profiler's source page."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.gpu.executed_code import launches_of, main


def page(name: str, executed: list[str], *, column: str = "Instructions Executed") -> str:
    lines = [f'"Kernel Name","{name}",', f'"Address","Source","{column}"']
    lines += [f'"{0x7F00 + 16 * i}","MOV R{i}, ""x""","{count}"' for i, count in enumerate(executed)]
    return "\n".join(lines) + "\n"


def test_sizes_and_runs() -> None:
    text = page("k_a", ["3", "3", "0", "1", "", "0", "7"]) + page("k_b", ["0"] * 64)
    first, second = launches_of(text.splitlines())
    assert (first.kernel, first.size, first.executed_size, first.runs) == ("k_a", 7 / 64, 4 / 64, 3)
    assert (second.kernel, second.size, second.executed_size, second.runs) == ("k_b", 1.0, 0.0, 0)


def test_launches_of_one_kernel_are_told_apart() -> None:
    body = page("k_a", ["1", "0"])
    again = body.splitlines()[2:]  # without a heading
    found = list(launches_of([*body.splitlines(), *again]))
    assert [launch.executed for launch in found] == [[True, False], [True, False]]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no kernel in it"),
        ("Kernel Name,k_a\n", "no kernel in it"),
        (page("k_a", ["1"], column="Samples"), "SourceCounters"),
    ],
)
def test_another_file_is_an_error(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        list(launches_of(text.splitlines()))


def test_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "source.csv"
    file.write_text(page("k_a", ["1"] * 96 + ["0"] * 32))
    monkeypatch.setattr("sys.argv", ["executed_code", str(file)])
    main()
    assert "| k_a | 2.0 | 1.5 | 1 |" in capsys.readouterr().out
    monkeypatch.setattr("sys.argv", ["executed_code", str(tmp_path / "none.csv")])
    with pytest.raises(SystemExit):
        main()
    assert "none.csv" in capsys.readouterr().err
