"""`spo-teacher` is one teacher of the run, and says what is wrong before it loads anything."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from common.config import load_config
from common.errors import UserError
from generator.teacher.cli import _chosen

MATHS = {"path": "a", "name": "maths"}
CODE = {"path": "b", "name": "code", "teacher": {"url": "http://x/v1"}}
MORE = {"path": "c", "name": "more"}
PLAIN = {"path": "d", "name": "plain", "teacher": {"model": None}}


def chosen(folder: Path, *sources: dict, source: str | None = None, model: str | None = "large") -> str:  # type: ignore[type-arg]
    file = folder / "run.yaml"
    tree = {"model": {"path": "m"}, "data": {"train": list(sources)}, "teacher": {"model": model}}
    file.write_text(yaml.safe_dump(tree))
    return _chosen(load_config(file, []), source)


def test_the_only_teacher_needs_no_name_and_any_of_its_sources_is_one(tmp_path: Path) -> None:
    assert chosen(tmp_path, MATHS, MORE, PLAIN) == "maths"
    assert chosen(tmp_path, MATHS, CODE, MORE, source="more") == "maths"
    assert chosen(tmp_path, MATHS, CODE, MORE, source="code") == "code"


@pytest.mark.parametrize(
    ("sources", "source", "model", "words"),
    [
        ([MATHS], None, None, "no source of data.train has a teacher with processes; set teacher.model"),
        ([MATHS, CODE], None, "large", "the run has 2 teachers; choose one by --source maths or code"),
        ([MATHS, CODE], "physics", "large", "--source physics: no source .* use maths or code"),
        ([MATHS, PLAIN], "plain", "large", "--source plain: no source .* use maths"),
    ],
)
def test_a_teacher_that_is_not_there_is_refused(tmp_path, sources, source, model, words) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(UserError, match=words):
        chosen(tmp_path, *sources, source=source, model=model)
