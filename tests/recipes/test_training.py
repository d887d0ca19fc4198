"""`stillhouse train`: what a run leaves behind, what it refuses, what resumes."""

import json
from pathlib import Path

import diffusers
import pytest
import torch
from data.pictures import write_shards
from metrics.shared import weights_folder
from safetensors import safe_open
from safetensors.torch import load_file

from stillhouse.cli import main
from stillhouse.data import Columns, DataConfig, ImageConfig, Parquet, PointsConfig, Tars
from stillhouse.engine.checkpoints import CheckpointStore
from stillhouse.engine.ema import HalfLife, PowerFunction
from stillhouse.engine.optimisers import AdamW
from stillhouse.engine.trackers import read_log
from stillhouse.errors import UserError
from stillhouse.pipelines import load_denoiser, read_facts
from stillhouse.pipelines.schedules import read_schedule
from stillhouse.process import Condition
from stillhouse.recipes.claims import locked
from stillhouse.recipes.plan.planning import describe, shadow
from stillhouse.recipes.train.catalogue import RECIPES
from stillhouse.recipes.train.networks import DiT, Perceptron, Pretrained, UNet
from stillhouse.recipes.train.processes import Edm, RectifiedFlow, Vp
from stillhouse.recipes.train.training import TrainRun, run
from stillhouse.recipes.train.watching import Preview, Validation

TINY = UNet(channels=(8, 16), layers=1, attention=(1,), head_width=8)


AVERAGE = "denoiser.averages.averages.power-0.1.network.model."


def points(out: Path, **changes) -> TrainRun:
    """A run of seconds."""
    settings = {
        "data": PointsConfig(labels=True),
        "network": Perceptron(width=16, depth=1),
        "process": Edm(sigma_data=0.7),
        "images": 400,
        "batch": 20,
        "averages": (HalfLife(images=100),),
        "log_every": 100,
        "checkpoint_every": 200,
        "preview": Preview(every=200, count=10, steps=3),
        "validation": Validation(every=200, images=40),
        "out": out,
    }
    return TrainRun(**(settings | changes))


@pytest.fixture
def images(tmp_path) -> DataConfig:
    files = (write_shards(tmp_path / "data", "parquet", [9, 9]),)
    return DataConfig(source=Parquet(files=files), image=ImageConfig(size=8))


def pictures(out: Path, data: DataConfig, **changes) -> TrainRun:
    settings = {"data": data, "network": TINY, "process": Edm(), "images": 64, "batch": 8}
    settings |= {"log_every": 16, "checkpoint_every": 32, "validation": Validation()}
    return points(out, **(settings | {"preview": Preview(every=32, count=4, steps=2)} | changes))


def final_tensors(out: Path, images: int) -> dict[str, torch.Tensor]:
    """Everything with weights in a checkpoint, by dotted name."""
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    target = out / "whole.pt"
    dcp_to_torch_save(out / "checkpoints" / f"images-{images:012d}", target)
    return torch.load(target, weights_only=True)


# ---------------------------------------------------------------- what is left behind


def test_a_run_leaves_its_record_log_pictures_and_model(tmp_path):
    assert run(points(tmp_path)) == 400
    record = json.loads((tmp_path / "run.json").read_text())
    assert TrainRun.model_validate(record["config"]) == points(tmp_path)
    assert record["network"]["parameters"] > 1000
    lines = read_log(tmp_path / "log.jsonl")
    assert [line["images"] for line in lines if "denoiser/loss" in line] == [100, 200, 300, 400]
    assert [line["images"] for line in lines if "validation/loss" in line] == [200, 400]
    grids = [line["samples"] for line in lines if "samples" in line]
    assert grids == [f"samples/images-{n:012d}.png" for n in (200, 400)]
    assert all((tmp_path / grid).stat().st_size > 500 for grid in grids)
    levels = lines[-4]["levels"] if "levels" in lines[-4] else lines[1]["levels"]
    assert len(levels["edges"]) == len(levels["loss"]) + 1
    assert "session" in lines[0]


def test_the_model_is_the_average_and_both_libraries_read_it(tmp_path, images):
    """Raw weights exported in its place would be a silent loss of quality."""
    config = pictures(tmp_path / "run", images, optim=AdamW(lr=1e-2))
    run(config)
    folder = tmp_path / "run" / "model"
    theirs = diffusers.UNet2DModel.from_pretrained(folder, low_cpu_mem_usage=False)
    stored = final_tensors(tmp_path / "run", 64)
    for name, weight in theirs.named_parameters():
        long = f"network.model.{name}"
        average = stored[f"denoiser.averages.averages.{config.shown}.{long}"]
        assert torch.equal(weight, average), name
        if "weight" in name and weight.ndim > 1:
            assert not torch.equal(weight, stored[f"denoiser.network.{long}"]), name
    ours = load_denoiser(folder)
    assert ours.scaling == Edm().build().scaling
    assert ours.prediction == "edm"
    scheduler = diffusers.EDMEulerScheduler.from_pretrained(folder)
    assert scheduler.config.sigma_data == 0.5


def test_the_config_is_in_the_metadata(tmp_path):
    run(points(tmp_path))
    facts = read_facts(tmp_path / "model")
    assert facts["images"] == 400
    assert facts["config"]["optim"] == AdamW().model_dump(mode="json")
    assert facts["null_label"] == 2
    assert "trackers" not in facts["config"]  # nor anything else of this machine
    with safe_open(tmp_path / "model" / "diffusion_pytorch_model.safetensors", "pt") as file:
        assert file.metadata()["format"] == "pt"


def test_labels_are_learnt_and_none_of_them_too(tmp_path):
    """The last label stands for no class; it must not be drawn as one."""
    run(points(tmp_path, drop=1.0))
    network = load_denoiser(tmp_path / "model").network
    assert (network.classes, network.null_label) == (3, 2)
    stored = final_tensors(tmp_path, 400)
    moments = stored["denoiser.optimiser.state.network.model.label.weight.exp_avg_sq"]
    assert (moments[:2] == 0).all()  # every label was dropped
    assert (moments[2] > 0).any()


def test_power_averages_are_stored_and_give_any_width(tmp_path):
    from stillhouse.recipes.train.averages import read_snapshots, synthesize_model

    profiles = (PowerFunction(sigma_rel=0.05), PowerFunction(sigma_rel=0.1))
    run(points(tmp_path, averages=profiles, snapshot_every=100))
    found = read_snapshots(tmp_path / "averages")
    assert sorted((s.images, s.sigma_rel) for s in found) == [
        (n, sigma) for n in (100, 200, 300, 400) for sigma in (0.05, 0.1)
    ]
    target = synthesize_model(tmp_path, sigma_rel=0.1, images=400)
    exact = final_tensors(tmp_path, 400)
    made = load_denoiser(target).network.model.state_dict()
    for name, weight in made.items():
        torch.testing.assert_close(weight, exact[AVERAGE + name], rtol=1e-4, atol=1e-5)


def test_pictures_that_cannot_be_read_are_named_in_the_log(tmp_path):
    from PIL import Image

    from stillhouse.data import Folder

    (tmp_path / "photos").mkdir()
    for i in range(12):
        Image.new("L", (8, 8), 20 * i).save(tmp_path / "photos" / f"{i:02}.png")
    (tmp_path / "photos" / "03.png").write_bytes(b"\x89PNG and then nothing")
    folder = Folder(path=str(tmp_path / "photos"))
    data = DataConfig(source=folder, image=ImageConfig(size=8))
    run(pictures(tmp_path / "run", data))
    lines = [line for line in read_log(tmp_path / "run" / "log.jsonl") if "faults" in line]
    assert [line["faults"] for line in lines] == [1]  # met again in every epoch, told once
    assert "03.png" in lines[0]["fault_examples"][0]


def test_a_model_is_handed_on_with_its_card(tmp_path, images):
    run(pictures(tmp_path / "run", images))
    main(["export", str(tmp_path / "run"), "--out", str(tmp_path / "out"), "--count", "4"])
    stored = load_file(tmp_path / "out" / "diffusion_pytorch_model.safetensors")
    assert {w.dtype for w in stored.values()} == {torch.bfloat16}
    exact = load_denoiser(tmp_path / "run" / "model").network.model.state_dict()
    assert all(torch.equal(stored[name], exact[name].bfloat16()) for name in exact)
    for folder in (tmp_path / "run" / "model", tmp_path / "out"):
        assert str(tmp_path) not in json.dumps(read_facts(folder))
    assert str(tmp_path) not in (tmp_path / "out" / "config.json").read_text()
    card = (tmp_path / "out" / "README.md").read_text()
    assert "| images seen | 64, in batches of 8 |" in card
    assert all((tmp_path / "out" / name).is_file() for name in ("grid.png", "curves.png"))
    with pytest.raises(SystemExit):
        main(["export", str(tmp_path / "nowhere")])


# ---------------------------------------------------------------- resume and refusals


def test_the_same_command_again_does_nothing_more(tmp_path):
    run(points(tmp_path))
    before = (tmp_path / "model" / "diffusion_pytorch_model.safetensors").read_bytes()
    assert run(points(tmp_path)) == 400
    assert (tmp_path / "model" / "diffusion_pytorch_model.safetensors").read_bytes() == before


def test_a_longer_run_goes_on(tmp_path):
    run(points(tmp_path / "a", images=200))
    assert run(points(tmp_path / "a")) == 400
    run(points(tmp_path / "b"))
    one, two = (final_tensors(tmp_path / name, 400) for name in "ab")
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_other_settings_in_the_same_folder_are_refused(tmp_path):
    run(points(tmp_path, images=200))
    with pytest.raises(UserError, match=r"seed: 0 -> 1"):
        run(points(tmp_path, images=200, seed=1))
    with pytest.raises(UserError, match=r"optim\.lr"):
        run(points(tmp_path, images=200, optim=AdamW(lr=3e-4)))
    run(points(tmp_path, images=200, log_every=7, micro_batch=5))  # how, not what


def test_checkpoints_of_another_run_are_refused(tmp_path):
    """The run's folder may be lost, and checkpoints live elsewhere: they know whose they are."""
    run(points(tmp_path / "a", images=200))
    elsewhere = str(tmp_path / "a" / "checkpoints")
    with pytest.raises(UserError, match=r"data\.toy: moons -> ring"):
        run(
            points(
                tmp_path / "b", data=PointsConfig(toy="ring", labels=True), checkpoints=elsewhere
            )
        )
    assert run(points(tmp_path / "c", checkpoints=elsewhere)) == 400


def test_settings_that_are_newer_than_a_run_do_not_stop_it(tmp_path):
    run(points(tmp_path, images=200))
    record = json.loads((tmp_path / "run.json").read_text())
    del record["config"]["drop"]
    (tmp_path / "run.json").write_text(json.dumps(record))
    assert run(points(tmp_path)) == 400


def test_a_file_system_without_locks_is_told_not_refused(tmp_path, monkeypatch):
    import errno
    import fcntl

    def unlockable(*_):
        raise OSError(errno.ENOLCK, "no locks available")

    monkeypatch.setattr(fcntl, "flock", unlockable)
    with pytest.warns(UserWarning, match="cannot be locked"), locked(tmp_path):
        pass


def test_two_runs_do_not_share_a_folder(tmp_path):
    with locked(tmp_path), pytest.raises(UserError, match="another run is using"):
        run(points(tmp_path))


def test_a_finished_checkpoint_survives_a_damaged_one(tmp_path):
    run(points(tmp_path))
    newest = tmp_path / "checkpoints" / "images-000000000400"
    shard = next(newest.glob("*.distcp"))
    raw = bytearray(shard.read_bytes())
    raw[len(raw) // 2] ^= 1
    shard.write_bytes(raw)
    with pytest.warns(UserWarning, match="the one at 200 images is used"):
        assert run(points(tmp_path)) == 400
    lines = read_log(tmp_path / "log.jsonl")
    assert any("passed over" in line.get("message", "") for line in lines)
    assert CheckpointStore(tmp_path / "checkpoints").find().images == 400


# ---------------------------------------------------------------- parts


def test_a_process_whose_walks_would_draw_noise_is_told_at_the_start(tmp_path):
    """Samples of cosine betas and eps, unclipped, were noise whatever the network had learnt."""
    config = points(tmp_path, process=Vp(betas="squaredcos_cap_v2"), images=20)
    run(config)
    said = [line.get("message", "") for line in read_log(config.out / "log.jsonl")]
    assert any("hold no signal" in message for message in said)
    for calm in (Vp(betas="squaredcos_cap_v2", prediction="v"), Vp(shift=2), Edm()):
        assert not calm.note


@pytest.mark.parametrize(
    "process", [Edm(sigma_data=0.6), Vp(), Vp(prediction="v"), RectifiedFlow()]
)
def test_a_process_is_what_its_saved_scheduler_says(process, tmp_path):
    kind = getattr(diffusers, process.scheduler()["_class_name"])
    kind.from_config(process.scheduler()).save_config(tmp_path)
    saved = read_schedule(json.loads((tmp_path / "scheduler_config.json").read_text()))
    built = process.build()
    sigma = torch.tensor([0.01, 0.5, 3.0])
    assert saved.prediction == built.prediction
    assert torch.equal(saved.scaling.time_at(sigma), built.scaling.time_at(sigma))
    assert torch.equal(saved.scaling.input_scale(sigma), built.scaling.input_scale(sigma))


def test_a_dit_drops_no_label_by_itself():
    """Its own dropout follows no key: another number of processes would see other labels."""
    from stillhouse.models import DiffusersNetwork

    model, null = DiT(patch=4, depth=1, heads=1, head_width=8).build((3, 8, 8), 10)
    torch.nn.init.normal_(model.proj_out_2.weight)
    network = DiffusersNetwork(model, null).train()
    x, time = torch.randn(64, 3, 8, 8), torch.zeros(64)
    cond = Condition(label=torch.zeros(64, dtype=torch.long))
    rows = network(x[:1].expand_as(x), time, cond)
    torch.testing.assert_close(rows, rows[:1].expand_as(rows))


@pytest.mark.parametrize(
    ("network", "shape", "classes", "words"),
    [
        (UNet(channels=(8, 16, 16)), (3, 30, 30), 0, "cannot be halved 2 times"),
        (DiT(patch=3), (3, 32, 32), 10, "patches of 3"),
        (DiT(), (3, 32, 32), 0, "told a class"),
        (Perceptron(), (3, 8, 8), 0, "takes points"),
        (UNet(), (2,), 0, "takes images"),
        (Pretrained(), (2,), 0, "--network.path"),
    ],
)
def test_networks_that_do_not_fit_say_so(network, shape, classes, words):
    with pytest.raises(UserError, match=words):
        network.build(shape, classes)


def test_a_run_goes_on_from_a_trained_model(tmp_path):
    run(points(tmp_path / "first"))
    start = Pretrained(path=str(tmp_path / "first" / "model"))
    model, null = start.build((2,), 2)
    assert null == 2
    exported = load_denoiser(tmp_path / "first" / "model").network.model.state_dict()
    assert all(torch.equal(w, exported[k]) for k, w in model.state_dict().items())
    run(points(tmp_path / "second", network=start, images=200))
    with pytest.raises(UserError, match="knows 2 classes"):
        start.build((2,), 3)


def test_a_model_of_another_process_is_not_trained_on_as_if_it_were_this_one(tmp_path):
    run(points(tmp_path / "first", process=RectifiedFlow(), images=200))
    start = Pretrained(path=str(tmp_path / "first" / "model"))
    with pytest.raises(UserError, match="trained as Flow, predicting flow"):
        run(points(tmp_path / "second", network=start, images=200))
    run(points(tmp_path / "third", network=start, process=RectifiedFlow(), images=200))


def test_a_model_without_a_label_for_no_class_is_drawn_with_its_classes(tmp_path):
    from stillhouse.models import DiffusersNetwork
    from stillhouse.pipelines import save_denoiser

    model, _ = Perceptron(width=16, depth=1).build((2,), 1)  # two labels, both of classes
    scheduler = Edm(sigma_data=0.7).scheduler()
    network = DiffusersNetwork(model)
    save_denoiser(tmp_path / "start", network, network.state_dict(), scheduler, facts={})
    start = Pretrained(path=str(tmp_path / "start"))
    run(points(tmp_path / "run", network=start, images=200))
    assert list((tmp_path / "run" / "samples").iterdir())


def test_held_out_tars_are_read_to_their_end(tmp_path, images):
    files = (write_shards(tmp_path / "tars", "tars", [9, 9]),)
    tars = DataConfig(
        source=Tars(files=files), columns=Columns(image="png"), image=images.image, buffer=4
    )
    held_out = Validation(every=32, images=8, source=Tars(files=files))
    run(pictures(tmp_path / "run", tars, validation=held_out))
    lines = read_log(tmp_path / "run" / "log.jsonl")
    assert [line["images"] for line in lines if "validation/loss" in line] == [32, 64]


# ---------------------------------------------------------------- the dry run


def test_the_dry_run_counts_parameters_and_trains_nothing(tmp_path, capsys):
    main(["train", "toy-moons", "--dry-run", "--out", str(tmp_path / "run"), "--network.width=32"])
    text = capsys.readouterr().out
    model, _ = Perceptron(width=32).build((2,), 0)
    count = sum(p.numel() for p in model.parameters())
    assert f"{count / 1e6:.2f}M parameters" in text
    assert "network.width" in text
    assert not (tmp_path / "run").exists()


def test_sharding_divides_the_memory(tmp_path):
    from stillhouse.engine.sharding import Spread
    from stillhouse.recipes.plan.planning import memory

    wide = Perceptron(width=256)
    config = points(tmp_path, network=wide, spread=Spread(sharding="fsdp"))
    one, four = (memory(config, n) for n in (1, 4))
    for part in ("weights", "gradients", "optimiser", "averages"):
        assert getattr(four, part) == pytest.approx(getattr(one, part) / 4, rel=0.02)
    assert "memory per process, of 4" in describe(config, 4)


# ---------------------------------------------------------------- the recipes


@pytest.mark.parametrize("name", [n for n in RECIPES if "finetune" not in n])
@pytest.mark.parametrize("scale", ["tiny", "full"])
def test_every_recipe_builds_its_network(name, scale, monkeypatch):
    monkeypatch.setenv("STILLHOUSE_WEIGHTS", str(weights_folder()))
    config = RECIPES[name](scale)
    network = shadow(config)
    shape = (16, 8, 8) if config.codec else config.data.shape
    assert network.data_shape == shape
    assert TrainRun.model_validate(config.model_dump()) == config


def test_full_fashion_is_small_enough_to_keep():
    """The reference model: at most 4M parameters and 8 MB in bfloat16."""
    count = sum(p.numel() for p in shadow(RECIPES["fashion-unet"]("full")).parameters())
    assert count <= 4e6
    assert 2 * count <= 8e6


def test_labels_without_a_number_of_classes_are_asked_for(tmp_path, images):
    import datasets

    rows = datasets.load_dataset("parquet", data_files=images.source.files[0], split="train")
    plain = rows.remove_columns("label").add_column("label", [0, 1, 2] * 6)
    plain.to_parquet(tmp_path / "plain.parquet")
    source = Parquet(files=(str(tmp_path / "plain.parquet"),))
    labelled = images.model_copy(update={"source": source, "columns": Columns(label="label")})
    with pytest.raises(UserError, match="--classes"):
        run(pictures(tmp_path / "run", labelled))
    run(pictures(tmp_path / "run", labelled, classes=3))
    named = images.model_copy(update={"columns": Columns(label="label")})
    with pytest.raises(UserError, match="--classes 7, but the data has"):
        run(pictures(tmp_path / "named", named, classes=7))
    assert load_denoiser(tmp_path / "run" / "model").network.null_label == 3


def test_the_command_line_names_recipes(capsys):
    with pytest.raises(SystemExit):
        main(["train", "fashion-unit"])
    assert "Did you mean fashion-unet?" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["train", "toy-moons", "--scale", "huge"])
    assert "tiny or full" in capsys.readouterr().err


def test_a_run_file_is_a_run(tmp_path):
    config = points(tmp_path / "run", images=100)
    (tmp_path / "run.json").write_text(config.model_dump_json())
    main(["train", str(tmp_path / "run.json"), "--images", "200"])
    assert (tmp_path / "run" / "checkpoints" / "images-000000000200").is_dir()


def test_a_run_goes_by_its_own_record(tmp_path):
    """RUN/run.json is a run file too, with other facts beside the config."""
    run(points(tmp_path / "run", images=200))
    main(["train", str(tmp_path / "run" / "run.json"), "--images", "400"])
    assert (tmp_path / "run" / "checkpoints" / "images-000000000400").is_dir()
    with pytest.raises(SystemExit):
        main(["train", str(tmp_path / "run" / "run.json"), "--images", "200"])


def test_a_folder_that_grew_is_not_the_place_where_the_run_was(tmp_path):
    """Rows would shift, and every image after them be another one."""
    from PIL import Image

    from stillhouse.data import Folder

    folder = tmp_path / "photos"
    folder.mkdir()
    with pytest.raises(UserError, match="holds no images"):
        Folder(path=str(folder)).open_indexed(Columns())
    for i in range(12):
        Image.new("L", (8, 8), 20 * i).save(folder / f"{i:02}.png")
    data = DataConfig(source=Folder(path=str(folder)), image=ImageConfig(size=8))
    run(pictures(tmp_path / "run", data, images=32))
    Image.new("L", (8, 8)).save(folder / "first.png")
    with pytest.raises(UserError, match="had 12 images when the run was stopped and has 13"):
        run(pictures(tmp_path / "run", data))


def test_a_consistency_model_is_drawn_in_one_step(tmp_path, monkeypatch):
    """More steps would follow an ODE that it does not know."""
    from stillhouse.objectives.configs import ConsistencyConfig
    from stillhouse.process import EDM

    asked = []
    grid = EDM.native_grid
    monkeypatch.setattr(EDM, "native_grid", lambda self, n: asked.append(n) or grid(self, n))
    run(points(tmp_path / "a", images=200))
    run(points(tmp_path / "b", images=200, objective=ConsistencyConfig()))
    assert asked == [3, 1]
