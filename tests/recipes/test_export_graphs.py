"""Graphs of every family say what our denoisers say, in onnxruntime and where there is torch alone.

Measured: 4e-7 to 9e-7 in onnxruntime, 0 in a .pt2.
"""

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import build_network, network_config, relative_error, small_unet, unit_noise
from torch import Tensor, nn
from tunable import SHALLOW

from stillhouse.errors import UserError
from stillhouse.models import DiffusersNetwork
from stillhouse.models.conditioning import Parts, Text, conditioned
from stillhouse.models.control import Layout
from stillhouse.models.mdt import MDTTransformer2DModel
from stillhouse.models.plane import PlaneNetwork
from stillhouse.process import EDM, SIGMA_CAP, VP, Condition, Flow, NetworkDenoiser
from stillhouse.recipes.export.graphs import FACTS, Graph, save_onnx, save_torch, trace

ABAR = torch.cumprod(1 - torch.linspace(1e-4, 2e-2, 1000, dtype=torch.float64), 0)
SIZES = ((1, 5), (2, 7), (5, 4))  # samples and tokens
FACTS_SAID = {"walks": {"3": [1.0, 0.0]}}


def small(model: str, **depths: int) -> Any:
    """With one block of every kind."""
    config = {**network_config(model, reduced=True), **SHALLOW.get(model, {}), **depths}
    return DiffusersNetwork(build_network(config))


def told_unet() -> DiffusersNetwork:
    """A U-Net that is told a framing and a number of steps, beside its class."""
    parts = Parts(layout=Layout(composition=("top",), detail=("height",)), steps=True)
    model = small_unet(num_class_embeds=5)
    return DiffusersNetwork(model, 4, conditioned(model, parts))


def told_sd3() -> DiffusersNetwork:
    """As it is trained here: text goes through attention alone, and is not told as one vector."""
    model = small("sd3").model
    told = conditioned(model, Parts(text=Text("encoder", "digest", 5)))
    return DiffusersNetwork(model, None, told)


def mdt() -> DiffusersNetwork:
    torch.manual_seed(0)
    sizes = {"sample_size": 8, "patch_size": 2, "in_channels": 3}
    widths = {"num_attention_heads": 2, "attention_head_dim": 8, "num_embeds_ada_norm": 7}
    depths = {"num_layers": 3, "decoder_layers": 1}  # one block of every kind
    return DiffusersNetwork(MDTTransformer2DModel(**sizes, **widths, **depths))


def plane() -> DiffusersNetwork:
    torch.manual_seed(0)
    return DiffusersNetwork(PlaneNetwork(width=16, depth=1, num_class_embeds=3))


Family = tuple[Callable[[], Any], Any, Any, float | None]
FAMILIES: dict[str, Family] = {
    "plane": (plane, EDM(sigma_data=0.7), "edm", None),
    "unet": (told_unet, EDM(), "edm", None),
    "sd15": (lambda: small("sd15"), VP(ABAR), "v", None),
    "sdxl": (lambda: small("sdxl"), VP(ABAR), "eps", 1.0),
    "pixart": (lambda: small("pixart-alpha", num_layers=1), VP(ABAR), "eps", None),
    "sd3": (lambda: small("sd3"), Flow(), "flow", None),
    "told sd3": (told_sd3, Flow(), "flow", None),
    "dit": (lambda: small("dit-xl-2", num_layers=1), VP(ABAR), "eps", None),
    "mdt": (mdt, EDM(), "edm", None),
}


def denoiser_of(name: str) -> NetworkDenoiser:
    build, scaling, prediction, clip = FAMILIES[name]
    network = build()
    for weight in network.parameters():  # some start at zero, which would hide mistakes
        if not weight.any():
            nn.init.normal_(weight, std=0.1)
    return NetworkDenoiser(network, scaling, prediction, clip=clip).eval()


def inputs_of(graph: Graph, count: int, tokens: int) -> dict[str, Tensor]:
    """Random ones, with some tokens masked and some control not said."""
    found: dict[str, Tensor] = {}
    for number, each in enumerate(graph.inputs):
        shape = [{"batch": count, "tokens": tokens}.get(str(s), s) for s in each.shape]
        values = unit_noise(tuple(map(int, shape)), seed=100 * count + number)
        if each.name == "sigma":
            levels = [0.03, 0.7, 5.0, 60.0, min(graph.scaling.sigma_max, SIGMA_CAP)]
            values = torch.tensor([levels[i % 5] for i in range(count)])
        elif each.dtype == "int64":
            values = torch.arange(count) % 3
        elif each.dtype == "bool":
            values = torch.arange(tokens).expand(count, tokens) < tokens - 1
        elif each.name == "control" and graph.network.told.layout.names:
            values = torch.where(values > 0.5, torch.nan, values)
        found[each.name] = values
    found["x"] = found["x"] * (1 + found["sigma"]).view(-1, *[1] * (found["x"].ndim - 1))
    return found


@dataclass(frozen=True)
class Made:
    """A family's files, and what our denoiser says to some inputs."""

    folder: Path
    cases: list[tuple[dict[str, Tensor], Tensor]]


CACHE: dict[str, Made] = {}


def make(name: str, root: Path) -> Made:
    if name not in CACHE:
        denoiser = denoiser_of(name)
        graph, cases = Graph(denoiser), []
        for count, tokens in SIZES:
            given = inputs_of(graph, count, tokens)
            said = {k: v for k, v in given.items() if k not in ("x", "sigma")}
            with torch.no_grad():
                x0 = denoiser(given["x"], given["sigma"].double(), Condition(**said))
            cases.append((given, x0))
        program = trace(graph)
        (root / name).mkdir()
        save_torch(program, root / name / "denoiser.pt2", FACTS_SAID)
        save_onnx(graph, program, root / name / "denoiser.onnx", FACTS_SAID)
        torch.save([(list(g.values()), x0) for g, x0 in cases], root / name / "cases.pt")
        CACHE[name] = Made(root / name, cases)
    return CACHE[name]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    yield tmp_path_factory.mktemp("graphs")
    CACHE.clear()


SLOW = [n if n == "plane" else pytest.param(n, marks=pytest.mark.slow) for n in FAMILIES]


@pytest.mark.parametrize("name", SLOW)
def test_onnxruntime_says_what_we_say(name, root):
    import onnxruntime

    made = make(name, root)
    session = onnxruntime.InferenceSession(made.folder / "denoiser.onnx")
    assert [i.name for i in session.get_inputs()] == list(made.cases[0][0])
    assert json.loads(session.get_modelmeta().custom_metadata_map[FACTS]) == FACTS_SAID
    assert b'File "' not in (made.folder / "denoiser.onnx").read_bytes()  # of a trace of the stack
    for given, x0 in made.cases:
        found = session.run(["x0"], {k: v.numpy() for k, v in given.items()})[0]
        assert found.shape == x0.shape
        for row, expected in zip(torch.from_numpy(found), x0, strict=True):  # each at its level
            assert relative_error(row, expected) < 1e-4


ALONE = """
import json, sys
import torch
for line in sys.stdin:
    folder, extra = line.rstrip(), {"stillhouse": ""}
    denoise = torch.export.load(f"{folder}/denoiser.pt2", extra_files=extra).module()
    worst = 0.0
    for given, x0 in torch.load(f"{folder}/cases.pt", weights_only=True):
        found = denoise(*given)
        for row, expected in zip(found, x0, strict=True):
            worst = max(worst, float((row - expected).abs().max() / expected.abs().max()))
    assert not {"stillhouse", "diffusers", "transformers"} & {*sys.modules}
    print(json.dumps([worst, json.loads(extra["stillhouse"])]), flush=True)
"""


@pytest.fixture(scope="module")
def alone():
    """A process with torch alone: told a folder, it answers how far its files are from its cases.

    One for all families: to load torch takes it longer than any of them.
    """
    pipes: Any = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen([sys.executable, "-c", ALONE], text=True, **pipes) as process:

        def ask(folder: Path) -> Any:
            print(folder, file=process.stdin, flush=True)
            answer = process.stdout.readline()
            assert answer, process.stderr.read()[-2000:]
            return json.loads(answer)

        yield ask


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_torch_alone_says_what_we_say(name, root, alone):
    worst, facts = alone(make(name, root).folder)
    assert worst < 1e-5
    assert facts == FACTS_SAID


def test_what_a_network_is_told_changes_what_a_graph_says(root):
    """Or the comparisons would say nothing of it."""
    graph = Graph(denoiser_of("unet"))
    given = inputs_of(graph, 2, 5)
    given["control"] = torch.ones_like(given["control"])
    with torch.no_grad():
        before = graph(*given.values())
        for name in ("sigma", "label", "control", "steps"):
            other = {**given, name: given[name] + 1}
            assert relative_error(graph(*other.values()), before) > 1e-3, name


def test_a_network_that_cannot_be_traced_is_refused_with_the_reason():
    class Asks(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x, *rest):
            return x if float(x.sum()) > 0 else -x

    graph = Graph(denoiser_of("plane"))
    graph.network.convention = type(graph.network.convention)(
        lambda model, x, time, cond: Asks(model)(x), graph.network.convention.needs
    )
    with pytest.raises(
        UserError, match=r"a PlaneNetwork cannot go through torch.export .*diffusers"
    ):
        trace(graph)
