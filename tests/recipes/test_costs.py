"""`stillhouse plan`: counts against closed forms, real steps and real processes."""

import json
import math
from dataclasses import asdict, replace
from pathlib import Path

import loaded
import numpy as np
import pytest
import torch
from data.pictures import write_shards
from metrics.shared import weights_folder
from models.test_text import write_bert
from recipes.costs_process import batch_of, build
from recipes.test_training import final_tensors
from safetensors.torch import load_file
from small_models import small_autoencoder
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from tunable import save_whole, tuning, write_images

from stillhouse.cli import main
from stillhouse.data import Columns, DataConfig, ImageConfig, Parquet
from stillhouse.data.crops import Layout
from stillhouse.data.loaded import Words
from stillhouse.data.prepare.samples import Sample
from stillhouse.data.prepare.shard import Form, ShardFile
from stillhouse.engine.ema import HalfLife
from stillhouse.engine.optimisers import AdamW8bit
from stillhouse.engine.sharding import Spread
from stillhouse.engine.world import World
from stillhouse.errors import UserError
from stillhouse.models.text import TextEncoder
from stillhouse.pipelines.prompts import PromptEncoder
from stillhouse.process import Condition
from stillhouse.recipes.plan import costs
from stillhouse.recipes.plan.costs import Planned, PlanRun, caption_operations, plan, traffic
from stillhouse.recipes.plan.devices import DEVICES
from stillhouse.recipes.plan.ledger import Ledger
from stillhouse.recipes.plan.planning import memory
from stillhouse.recipes.plan.shadows import footprint, measure, told_tokens
from stillhouse.recipes.telling import CaptionText
from stillhouse.recipes.train.catalogue import RECIPES
from stillhouse.recipes.train.networks import Backbone, DiT, UNet
from stillhouse.recipes.train.progressive import legs
from stillhouse.recipes.train.training import TrainRun, run
from stillhouse.recipes.train.tuning import Tuned, fitted
from stillhouse.recipes.train.watching import Preview

HERE = World(0, 1, torch.device("cpu"))
ALONE = Spread()


def run_of(network, batch=8, **changes) -> TrainRun:
    data = DataConfig(image=ImageConfig(size=16), columns=Columns(label="label"))
    return TrainRun(data=data, classes=10, network=network, batch=batch, **changes)


# ---------------------------------------------------------------- operations


def dit_operations(depth: int, width: int, tokens: int, patch: int) -> tuple[int, int]:
    """Forward, and forward with backward, of diffusers' DiT on one image of 3 channels."""
    pixels = 3 * patch**2
    from_time = 2 * 256 * width  # both of these have inputs that want no gradient
    from_image = 2 * tokens * pixels * width
    embedder = from_time + 2 * width**2
    linear = 2 * tokens * width**2 * (4 + 8) + 2 * 6 * width**2  # attention, feed-forward, norm
    scores = 2 * 2 * tokens**2 * width
    ends = from_image + embedder + 2 * width * 2 * width + 2 * tokens * width * pixels
    forward = depth * (embedder + linear + scores) + ends
    # The backward of a product is two products; of fused attention, five where forward has two.
    backward = 2 * forward + depth * scores // 2 - from_image - (depth + 1) * from_time
    return forward, forward + backward


@pytest.mark.parametrize("patch", [2, 4])
def test_operations_of_a_dit_are_the_closed_form(patch):
    network = DiT(patch=patch, depth=2, heads=2, head_width=16)
    found = measure(run_of(network), ALONE, 1)
    forward, both = dit_operations(2, 32, (16 // patch) ** 2, patch)
    assert found.forward == forward
    assert found.operations == both


@pytest.mark.parametrize(
    "network",
    [
        Backbone(name="mdt", size="tiny"),
        Backbone(name="mdt", size="tiny", masked=False),
        Backbone(name="dit", size="tiny"),
        UNet(channels=(8, 16), layers=1, head_width=8),
    ],
    ids=["mdt", "mdt-unmasked", "dit", "unet"],
)
def test_operations_are_those_of_a_real_step(network):
    config = run_of(network)
    learner = build(config, HERE)
    batch = batch_of(learner, config, HERE)
    hidden = batch.condition.hidden
    whole = replace(batch, condition=Condition(label=batch.condition.label))
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        for rows in [whole] if hidden is None else [whole, batch]:
            learner.objective(learner.denoiser, rows, learner.draws)
    assert measure(config, ALONE, 1).forward == counter.get_total_flops() / 8


def test_recomputing_costs_another_forward_of_the_blocks():
    config = run_of(DiT(patch=2, depth=6, heads=2, head_width=16))
    plain, again = (measure(config, Spread(checkpointing=c), 1) for c in (False, True))
    assert again.forward == plain.forward
    blocks = dit_operations(6, 32, 64, 2)[0] - dit_operations(0, 32, 64, 2)[0]
    assert again.operations - plain.operations == pytest.approx(blocks, rel=0.05)
    assert again.activations < plain.activations / 2


# ---------------------------------------------------------------- memory


def test_a_ledger_sees_what_comes_and_what_goes():
    known = torch.zeros(1000)
    with Ledger([known]) as ledger:
        first = torch.ones(100)  # 400
        second = first + known[:100]  # 400 more
        del first
        third = torch.cat([second, second])  # 800 more, of which 400 have gone
        del second
        known.add_(1)
    assert ledger.peak() == 1200
    assert ledger.peak(without={ledger.number(third)}) == 800
    assert sum(more for _, more in ledger.moments) == 800


def test_a_ledger_follows_a_storage_that_is_emptied_and_filled():
    with Ledger() as ledger:
        tensor = torch.ones(100)
        tensor.untyped_storage().resize_(0)
        other = torch.ones(50)
        del other
        tensor.untyped_storage().resize_(400)
    assert ledger.peak() == 400


CASES = [
    ("dit", "tiny", Spread(), 0),
    ("dit", "small", Spread(precision="bf16"), 0),
    ("dit", "small", Spread(checkpointing=True), 0),
    ("dit", "tiny", Spread(precision="bf16", checkpointing=True), 4),
    ("mdt", "tiny", Spread(precision="bf16"), 0),
    ("dit", "tiny", Spread(sharding="fsdp"), 0),
    ("dit", "small", Spread(sharding="fsdp", precision="bf16"), 0),
    ("dit", "tiny", Spread(sharding="fsdp", checkpointing=True, precision="bf16"), 0),
    ("dit", "small", Spread(sharding="fsdp", checkpointing=True), 0),
    ("dit", "small", Spread(sharding="fsdp", precision="bf16"), 4),
    ("dit", "small", Spread(sharding="ddp"), 0),
]


def spread_run(case: tuple[str, str, Spread, int]) -> tuple[TrainRun, int]:
    """With the number of its processes."""
    name, size, how, micro = case
    processes = 1 if how.sharding == "none" else 2
    network = Backbone(name=name, size=size)
    return run_of(network, batch=8 * processes, micro_batch=micro, spread=how), processes


@pytest.fixture(scope="module")
def real(tmp_path_factory) -> list[dict[str, int]]:
    """For each case, the most that any of its processes holds of each part.

    All cases of as many processes are measured by the same ones.
    """
    folder, found = tmp_path_factory.mktemp("real"), {}
    for processes in (1, 2):
        runs = {i: run for i, run in enumerate(map(spread_run, CASES)) if run[1] == processes}
        file = folder / f"{processes}.json"
        file.write_text(json.dumps([config.model_dump(mode="json") for config, _ in runs.values()]))
        script = str(Path(__file__).with_name("costs_process.py"))
        done = loaded.run(script, str(file), processes=processes, timeout=900)
        assert done.returncode == 0, done.stderr[-2000:]
        for i, line in zip(runs, done.stdout.strip().splitlines()[-len(runs) :], strict=True):
            each = json.loads(line)
            assert len(each) == processes
            found[i] = {name: max(one[name] for one in each) for name in each[0]}
    return [found[i] for i in range(len(CASES))]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "size", "how", "micro"), CASES)
def test_memory_is_that_of_real_processes(name, size, how, micro, real):
    """By what torch's allocator gave them: each part within a tenth, and the peak of a step."""
    case = (name, size, how, micro)
    config, processes = spread_run(case)
    step = measure(config, how, processes)
    counted, found = footprint(config, step, how), real[CASES.index(case)]
    for part in ("weights", "gradients", "optimiser", "averages"):
        assert getattr(counted, part) == pytest.approx(found[part], rel=0.01), part
    peak = step.activations if how.sharding == "ddp" else step.peak
    assert peak == pytest.approx(found["peak"], rel=0.1)


def test_the_dry_run_and_the_plan_count_the_same_memory():
    config = run_of(Backbone(name="dit", size="tiny"), spread=Spread(sharding="fsdp"))
    lines = plan(config, PlanRun(gpus=2))
    line = next(line for line in lines if line.section.startswith("memory") and line.name == "fsdp")
    shown = asdict(memory(config, 2))
    assert {**line.parts, "together": line.value} == {k: v / 1e9 for k, v in shown.items()}


def test_more_processes_hold_less_of_a_sharded_network():
    config = run_of(Backbone(name="dit", size="small"), batch=64)
    one, many = (measure(config, Spread(sharding="fsdp"), n) for n in (2, 64))
    assert many.trained == pytest.approx(one.trained / 32, rel=0.02)
    copied = measure(config, Spread(), 64)
    assert copied.trained == pytest.approx(2 * one.trained, rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in RECIPES if not name.startswith("finetune")])
def test_every_recipe_can_be_planned(name, monkeypatch):
    monkeypatch.setenv("STILLHOUSE_WEIGHTS", str(weights_folder()))
    config = legs(RECIPES[name]("tiny"))[-1]
    step = measure(config, config.spread, 1)
    assert step.operations > 2 * step.forward > 0


# ---------------------------------------------------------------- communication, time, storage


def planned(config: TrainRun, place: PlanRun, parameters: int = 1000) -> Planned:
    network = torch.nn.Linear(parameters, 1, bias=False, device="meta")
    return Planned(config, place, DEVICES[place.device], [], None, network)


def test_rings_send_what_the_formulas_say():
    config = run_of(UNet(), batch=64, micro_batch=2, spread=Spread(precision="bf16"))
    found = planned(config, PlanRun(gpus=16, per_node=8))
    both = config.spread.model_copy(update={"shard_size": 8})
    ddp, fsdp, hsdp = (
        traffic(found, both.model_copy(update={"sharding": kind}))
        for kind in ("ddp", "fsdp", "hsdp")
    )
    assert ddp == (0, 2 * 15 / 16 * 4000)
    # Two micro-batches gather 2000 bytes of bfloat16 twice each, and gradients are reduced once.
    assert fsdp == (0, 15 / 16 * (4 * 2000 + 4000))
    assert hsdp == (7 / 8 * (4 * 2000 + 4000), 2 * 1 / 2 * 4000 / 8)
    within = planned(config, PlanRun(gpus=8, per_node=8))
    assert traffic(within, both.model_copy(update={"sharding": "ddp"})) == (7000, 0)


def named(lines: list[costs.Line], name: str) -> costs.Line:
    return next(line for line in lines if line.name == name)


def test_hours_follow_from_counted_operations_and_the_rate():
    config = run_of(DiT(patch=4, depth=1, heads=2, head_width=16), images=10**9)
    bf16 = config.model_copy(update={"spread": Spread(precision="bf16")})
    lines = plan(bf16, PlanRun(gpus=1, device="a100-80", utilisation=0.5))
    _, operations = dit_operations(1, 32, 16, 4)
    hours = 1e9 * operations / (312e12 * 0.5) / 3600
    assert named(lines, "all steps").value == pytest.approx(hours)
    assert named(lines, "steps").value == 10**9 / 8
    own = plan(config, PlanRun(device="cpu", flops_per_second=1e9))
    assert named(own, "all steps").value == pytest.approx(operations / 3600)


def test_a_cpu_has_no_hours_that_nobody_measured():
    lines = plan(run_of(DiT(depth=1, heads=2, head_width=16)), PlanRun(device="cpu"))
    line = named(lines, "all steps")
    assert line.value is None
    assert "--flops-per-second" in line.how


def test_a_prepared_image_is_as_large_as_in_a_real_shard(tmp_path, monkeypatch):
    """But for names, crops and digests: a few per cent."""
    monkeypatch.setenv("STILLHOUSE_WEIGHTS", str(weights_folder()))
    config = RECIPES["emoji-latent"]("tiny")
    found = replace(
        planned(config, PlanRun()), codec=costs.build_codec(config, torch.device("cpu"))
    )
    counted = next(costs._shards(found, 1000)).value
    form = Form(Columns(text="caption"), text_dtype="float32")
    generator = np.random.default_rng(0)
    sheet = Layout.whole((64, 64))
    shard = ShardFile(tmp_path / "shard.parquet", form.schema())
    for i in range(1000):
        sample = Sample(f"images/{i}.png", "", i, np.zeros(0, np.uint8), sheet, None, "a cat", ())
        tokens, pooled = generator.normal(size=(16, 384)), generator.normal(size=384)
        latent = generator.normal(size=(16, 8, 8)).astype(np.float32)
        words = Words(tokens.astype(np.float32), pooled.astype(np.float32))
        shard.add([form.record(sample, latent, words)])
    shard.close()
    size = (tmp_path / "shard.parquet").stat().st_size
    assert size / 1e6 == pytest.approx(counted, rel=0.05)
    assert size / 1e6 > counted


def tensors_in(folder: Path) -> int:
    """Bytes of all weights below it."""
    files = folder.rglob("*.safetensors")
    return sum(tensor.nbytes for file in files for tensor in load_file(file).values())


def assert_checkpoint_as_planned(config: TrainRun, lines: list[costs.Line]) -> None:
    written = sum(tensor.nbytes for tensor in final_tensors(config.out, config.images).values())
    assert written / 1e9 == pytest.approx(named(lines, "a checkpoint").value, rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("codec", [False, True])
def test_checkpoints_and_models_are_as_large_as_planned(codec, tmp_path):
    small_autoencoder(4).save_pretrained(tmp_path / "codec")
    shards = write_shards(tmp_path / "data", "parquet", [8])
    source, columns = Parquet(files=(shards,)), Columns(label="label")
    changes = {
        "data": DataConfig(source=source, columns=columns, image=ImageConfig(size=16)),
        "classes": 0,
        "codec": str(tmp_path / "codec") if codec else "",
        "images": 8,
        "averages": (HalfLife(images=100), HalfLife(images=200)),
        "preview": Preview(every=8, count=1, steps=1),
        "out": tmp_path / "run",
    }
    config = run_of(DiT(depth=1, heads=2, head_width=16)).model_copy(update=changes)
    lines = plan(config, PlanRun())
    run(config)
    assert_checkpoint_as_planned(config, lines)
    model = named(lines, "the exported model").value
    assert tensors_in(config.out / "model") / 1e9 == pytest.approx(model, rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["full", "lora"])
def test_what_fine_tuning_stores_is_as_large_as_planned(method, tmp_path):
    folder, images = save_whole(tmp_path / "sd15", "sd15"), write_images(tmp_path / "data")
    network = Tuned(path=str(folder), method=method, rank=8)
    config = tuning(folder, images, tmp_path / "run", network=network)
    lines = plan(config, PlanRun())
    run(config)
    assert_checkpoint_as_planned(config, lines)
    model, planned_model = config.out / "model", named(lines, "the exported model")
    size, how = tensors_in(model), "counted"
    if method == "full":
        beside = [f for f in model.rglob("*/*") if f.is_file() and f.parent.name != "unet"]
        size, how = tensors_in(model / "unet") + sum(f.stat().st_size for f in beside), "estimated"
    assert planned_model.how.startswith(how)
    assert size / 1e9 == pytest.approx(planned_model.value, rel=0.01)


def test_a_checkpoint_of_8_bit_moments_is_an_estimate_and_smaller():
    config = run_of(DiT(depth=1, heads=2, head_width=16))
    low = config.model_copy(update={"optim": AdamW8bit()})
    plain, eighth = (named(plan(each, PlanRun()), "a checkpoint") for each in (config, low))
    assert plain.how == "counted"
    assert eighth.how.startswith("estimated: ")
    # Of four tensors of 4 bytes (weights, an average, two moments) two have 1, and their scales.
    assert eighth.value / plain.value == pytest.approx((8 + 2 * (1 + 4 / 256)) / 16, rel=1e-6)


# ---------------------------------------------------------------- the command

TOY = ["plan", "toy-moons", "--network.width", "16"]


def test_every_line_says_whether_it_was_counted_or_estimated(capsys):
    main([*TOY, "--gpus", "4", "--device", "h100", "--images", "400e6"])
    shown = capsys.readouterr().out
    assert "400,000,000 images in batches of 500 on 4 x H100" in shown
    rows = [row for row in shown.splitlines() if row.startswith("  ") and row[2] != " "]
    assert len(rows) > 12
    assert all(" counted" in row or " estimated: " in row for row in rows)


def test_machines_get_the_same_as_json(capsys):
    main([*TOY, "--json", "--gpus", "2", "--batch=64"])
    (found,) = json.loads(capsys.readouterr().out)
    assert found["batch"] == 64
    assert found["place"]["gpus"] == 2
    assert found["device"]["memory"] == 80e9
    ways = [line["name"] for line in found["lines"] if line["section"].startswith("memory")]
    assert ways == ["ddp", "ddp, recomputing", "fsdp", "fsdp, recomputing"]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], "name a recipe"),
        (["toy-moons", "--gpus", "3"], "a batch of 500 cannot be shared by 3 GPUs"),
        (["toy-moons", "--device", "h1000"], "the closest is 'h100'"),
        (["toy-moons", "--gpus", "20", "--per-node", "8"], "cannot be split into groups of 8"),
        (["toy-mons"], "Did you mean toy-moons?"),
        (["toy-moons", "--scale", "huge"], "--scale is tiny or full"),
    ],
)
def test_mistakes_in_a_plan_are_answered_in_a_sentence(words, told, capsys):
    with pytest.raises(SystemExit):
        main(["plan", *words])
    assert told in capsys.readouterr().err


def test_a_plan_under_torchrun_is_refused(monkeypatch):
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    with pytest.raises(UserError, match="without torchrun"):
        measure(run_of(UNet()), Spread(sharding="fsdp"), 2)


def test_data_sheets_are_named_and_their_figures_are_possible():
    for device in DEVICES.values():
        if device is not None:
            assert "NVIDIA" in device.source
            assert device.fp32 < device.bf16 < 2e15
            assert 1e9 < device.network <= device.link or not device.network
            assert math.isclose(device.memory % 1e9, 0)


@pytest.mark.parametrize("name", ["sd15", "sd3"])
def test_a_plan_of_fine_tuning_counts_the_tokens_of_real_prompts(name, tmp_path):
    folder, images = save_whole(tmp_path / name, name), write_images(tmp_path / "data")
    config = fitted(tuning(folder, images, tmp_path / "run"))
    encoder = PromptEncoder(folder)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        tokens = encoder.encode(["red"]).text.shape[1]
    assert told_tokens(config) == tokens
    assert caption_operations(config) == counter.get_total_flops() > 0
    whole, lora = (
        named(plan(config.model_copy(update={"network": how}), PlanRun()), "a checkpoint").value
        for how in (Tuned(path=str(folder)), Tuned(path=str(folder), method="lora", rank=1))
    )
    assert lora < 0.2 * whole


def test_encoding_a_caption_is_counted_and_none_where_none_is_encoded(tmp_path):
    write_bert(tmp_path)
    text = CaptionText(encoder=str(tmp_path / "bert"), length=9)
    encoder = TextEncoder(text.encoder, length=9)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        encoder.encode(["red apples in a box"])
    assert caption_operations(TrainRun(text=text)) == counter.get_total_flops() > 0
    assert caption_operations(TrainRun()) == 0


def test_the_recipe_may_stand_behind_the_flags_of_the_plan(capsys):
    main(["plan", "--gpus", "2", "--json", "toy-moons", "--scale", "tiny", "--batch=500"])
    (found,) = json.loads(capsys.readouterr().out)
    assert found["place"]["gpus"] == 2
    assert found["batch"] == 500
