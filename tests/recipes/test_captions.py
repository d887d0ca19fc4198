"""Text to image: images that fit their captions find them, by encoders that run offline."""

from pathlib import Path

import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from metrics.parity import minilm_folder
from metrics.shared import SHARED, weights_folder

from stillhouse.data import Columns
from stillhouse.errors import UserError
from stillhouse.metrics.detectors import MobileNetV2Config
from stillhouse.metrics.text import SentenceEncoder
from stillhouse.recipes.judge.evaluating import EvaluateRun, run


@pytest.fixture(scope="module")
def encoder() -> str:
    return minilm_folder()


def test_equal_sentences_are_near_and_batches_do_not_matter(encoder):
    encode = SentenceEncoder(encoder)
    found = encode(["a red apple", "an apple, red", "traffic jam", "a red apple"])
    assert found.shape == (4, 384)
    assert (found.norm(dim=1) - 1).abs().max() < 1e-5
    near, far = found[0] @ found[1], found[0] @ found[2]
    assert near > 0.8 > 0.4 > far
    assert (found[0] == found[3]).all()
    assert (encode(["a red apple"])[0] - found[0]).abs().max() < 1e-5  # padding is no part of it


def write_style(target: Path, style: str, start: int, count: int) -> str:
    data = SHARED / "data" / "emoji"
    if not data.is_dir():
        pytest.skip(f"{data} is not on this machine")
    table = pq.read_table(sorted(data.glob("*.parquet"))[0])
    table = table.filter(pc.field("style") == style).slice(start, count)
    pq.write_table(table, target)
    return str(target)


@pytest.mark.slow
def test_emoji_find_their_captions(encoder, tmp_path):
    """Real pictures far above chance; the same pictures under wrong captions at chance."""
    config = EvaluateRun(
        model=write_style(tmp_path / "samples.parquet", "twemoji", 0, 200),
        reference=write_style(tmp_path / "reference.parquet", "noto", 0, 600),
        columns=Columns(text="caption"),
        metrics=("retrieval",),
        detector=MobileNetV2Config(weights=str(weights_folder() / "mobilenet_v2.safetensors")),
        text_encoder=encoder,
        count=200,
        cache=tmp_path / "cache",
        out=tmp_path / "right",
    )
    right = run(config)["settings"][0]["values"]
    assert right["recall@10"][0] > 5 * right["chance@10"][0]
    wrong = tmp_path / "wrong.parquet"
    table = pq.read_table(config.model)
    captions = table["caption"].to_pylist()
    turned = table.set_column(
        table.schema.get_field_index("caption"), "caption", [captions[77:] + captions[:77]]
    )
    pq.write_table(turned, wrong)
    other = run(config.model_copy(update={"model": str(wrong), "out": tmp_path / "wrong"}))
    values = other["settings"][0]["values"]
    assert values["recall@10"][0] < 3 * values["chance@10"][0]


def test_captions_that_are_not_there_are_asked_for(tmp_path):
    config = EvaluateRun(
        model=write_style(tmp_path / "samples.parquet", "twemoji", 0, 8),
        reference=write_style(tmp_path / "reference.parquet", "noto", 0, 8),
        metrics=("retrieval",),
        detector=MobileNetV2Config(weights=str(weights_folder() / "mobilenet_v2.safetensors")),
        count=8,
        cache=tmp_path / "cache",
        out=tmp_path / "out",
    )
    with pytest.raises(UserError, match="needs captions"):
        run(config)
