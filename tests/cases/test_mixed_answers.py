"""A server that hands out the ids of another answer: right in number, and training on them would teach noise."""

from collections import Counter
from pathlib import Path

from tests import models
from tests.chaos.conftest import Here


def test_ids_of_another_answer_are_seen_and_stop_the_run(here: Here, tmp_path: Path) -> None:
    """As many ids as the text has tokens, with their end token: only their spelling tells."""
    model = models.as_bytes(models.folder(tmp_path / "model", {"model.safetensors": {"w": (8, 8)}}))
    args = {"slots": 4, "mixed-after": 8}
    code, said = here(model={"path": str(model), "name": "fake"}, engine={"args": args}, fleet={"servers": 1})
    assert code == 5, said
    rows = here.case.records()
    labels = Counter(label for record in rows for label in record.labels)
    assert set(labels) == {"ids_disagree"}
    sound = [record for record in rows if not record.labels]
    assert len(sound) == 4, "those before it began"
    assert "ids_disagree" in said
