"""A denoiser as one graph that other runtimes call, of any family in the same way:

    x      [batch, ...]   the state x0 + sigma * noise
    sigma  [batch]        its noise levels
    ...    [batch, ...]   what the network is told, by the names of `Condition`
    -> x0  [batch, ...]   the expected clean data

Scaling, time and prediction are inside. The batch and the number of text tokens are free, the size
of images is that of the model. What a caller must know is written into the file as JSON (`FACTS`).
"""

import json
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from stillhouse.errors import UserError, missing_extra, one_line
from stillhouse.models import Codec
from stillhouse.process import VP, Condition, NetworkDenoiser
from stillhouse.process.predictions import Prediction, rows, to_x0

FACTS = "stillhouse"  # the key of the JSON: in ONNX's metadata, and among the files of a .pt2
BATCH, TOKENS = 3, 5  # of the example that is traced: neither may look like a constant
WHOLE = {"label", "steps"}  # fields of whole numbers
MEANINGS = {
    "x": "the state, x0 + sigma * noise",
    "sigma": "noise level of each sample",
    "label": "class",
    "text": "tokens of the text encoder",
    "text_mask": "which tokens are real",
    "pooled": "the prompt as one vector",
    "control": "how the image is framed; not a number: not said",
    "steps": "timestamps of the walk, the last level counted",
}


class Input(NamedTuple):
    """One input of a graph; a word in its shape is an axis of any length."""

    name: str
    dtype: str
    shape: tuple[int | str, ...]
    meaning: str

    def example(self, sizes: Mapping[str, int]) -> Tensor:
        shape = [sizes[s] if isinstance(s, str) else s for s in self.shape]
        dtype = getattr(torch, self.dtype)
        if not dtype.is_floating_point:
            return torch.ones(shape, dtype=dtype)
        return torch.linspace(0.1, 1, max(1, torch.Size(shape).numel())).view(shape).to(dtype)


# ---------------------------------------------------------------- what is traced


class Graph(nn.Module):
    """`denoise(x, sigma, *told)`, where `told` are the fields of the condition in their order.

    `NetworkDenoiser` asks for the length of its batch as a number, which a trace would keep; and
    ONNX has no search in a table, so a discrete process counts the levels that lie below.
    """

    levels: Tensor  # the logarithms of a discrete process's sigmas; empty of others

    def __init__(self, denoiser: NetworkDenoiser) -> None:
        super().__init__()
        self.network: Any = denoiser.network
        self.scaling, self.clip = denoiser.scaling, denoiser.clip
        self.prediction: Prediction = denoiser.prediction
        self.dtype = next(p.dtype for p in denoiser.parameters() if p.is_floating_point())
        self.inputs = (
            _input("x", self.network.data_shape),
            _input("sigma", ()),
            *(_input(name, shape) for name, shape in told_shapes(self.network).items()),
        )
        table = torch.zeros(0, dtype=torch.float64)
        if isinstance(self.scaling, VP):
            times = torch.arange(len(self.scaling.alphas_cumprod), dtype=torch.float64)
            table = self.scaling.sigma_at(times).log()
        self.register_buffer("levels", table, persistent=False)

    def forward(self, x: Tensor, sigma: Tensor, *told: Tensor) -> Tensor:
        names = [each.name for each in self.inputs[2:]]
        said: dict[str, Any] = dict(zip(names, told, strict=True))
        scaled = rows(self.scaling.input_scale(sigma), x) * x
        output = self.network(scaled.to(self.dtype), self._time(sigma), Condition(**said))
        x0 = to_x0(self.prediction, x, output.to(x.dtype), sigma, self.scaling.sigma_data)
        return x0 if self.clip is None else x0.clamp(-self.clip, self.clip)

    def _time(self, sigma: Tensor) -> Tensor:
        if not isinstance(self.scaling, VP):
            return self.scaling.time_at(sigma).float()
        log_sigma = sigma.double().log()
        right = (self.levels < log_sigma[:, None]).sum(1).clamp(1, self.levels.shape[0] - 1)
        low, high = self.levels.take(right - 1), self.levels.take(right)
        return (right - 1 + ((log_sigma - low) / (high - low)).clamp(0, 1)).float()


class Decoder(nn.Module):
    """Images from latents."""

    def __init__(self, codec: Codec, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.codec = codec
        self.inputs = (_input("latents", shape),)

    def forward(self, latents: Tensor) -> Tensor:
        return self.codec.decode(latents)


def told_shapes(network: Any) -> dict[str, tuple[int | str | None, ...]]:
    """The fields that the graph is told. PixArt's padding is seen by nobody but through its mask;
    what was trained here has padding that takes part."""
    shapes = dict(network.condition_shapes)
    names = {base.__name__ for base in type(network.model).__mro__}
    if "PixArtTransformer2DModel" in names and "text" in shapes and network.told.text is None:
        shapes["text_mask"] = (None,)
    return shapes


def _input(name: str, shape: Sequence[int | str | None]) -> Input:
    dtype = "int64" if name in WHOLE else "bool" if name == "text_mask" else "float32"
    sizes = ("batch", *("tokens" if size is None else size for size in shape))
    return Input(name, dtype, sizes, MEANINGS.get(name, "what the decoder turns into images"))


# ---------------------------------------------------------------- files


def trace(graph: Graph | Decoder) -> torch.export.ExportedProgram:
    """The graph for any batch and number of tokens, or a sentence why there is none."""
    lengths, free = {"batch": BATCH, "tokens": TOKENS}, torch.export.Dim.DYNAMIC
    example = tuple(each.example(lengths) for each in graph.inputs)
    axes = [
        {i: free for i, size in enumerate(each.shape) if isinstance(size, str)}
        for each in graph.inputs
    ]
    told = [tuple(axes[2:])] if len(axes) > 2 else []  # one argument, however many there are
    shapes: Any = (*axes[:2], *told)
    graph.eval().requires_grad_(False)
    try:
        with quiet():
            program = torch.export.export(graph, example, dynamic_shapes=shapes)
    except Exception as error:  # whatever a network does that a trace cannot follow
        raise _refused(graph, "torch.export", error) from error
    _forget_source(program)
    return program


def _forget_source(program: torch.export.ExportedProgram) -> None:
    """Nodes know the lines of code that they are from, with the paths of this machine."""
    for module in program.graph_module.modules():
        for node in module.graph.nodes if isinstance(module, torch.fx.GraphModule) else ():
            node.meta.pop("stack_trace", None)


def largest_batch(program: torch.export.ExportedProgram) -> int | None:
    """That a .pt2 takes; None: any. diffusers' U-Nets do something else from 64 samples on."""
    name = next(iter(program.graph_signature.user_inputs))
    first = next(node for node in program.graph.nodes if node.name == name)
    bounds: Any = program.range_constraints.get(first.meta["val"].shape[0].node.expr)
    if bounds is None or not bounds.upper.is_Integer or bounds.upper >= 2**31:
        return None
    return int(bounds.upper)


def save_torch(program: torch.export.ExportedProgram, file: Path, facts: Mapping[str, Any]) -> None:
    """A .pt2, which `torch.export.load` opens where there is torch and nothing else."""
    with quiet():
        torch.export.save(program, file, extra_files={FACTS: json.dumps(facts)})


def save_onnx(
    graph: Graph | Decoder,
    program: torch.export.ExportedProgram,
    file: Path,
    facts: Mapping[str, Any],
) -> None:
    """An ONNX file; weights of more than 2 GB go into a second one, whose name is longer."""
    check_onnx()
    _drop_idle_squeezes(program)
    names = [each.name for each in graph.inputs]
    output = "image" if isinstance(graph, Decoder) else "x0"
    try:
        with quiet():
            made: Any = torch.onnx.export(
                program, input_names=names, output_names=[output], dynamo=True, verbose=False
            )
    except Exception as error:  # operators that ONNX lacks, among others
        raise _refused(graph, "ONNX", error) from error
    from onnxscript import ir

    for value, each in zip(made.model.graph.inputs, graph.inputs, strict=True):
        value.doc_string, value.shape = each.meaning, ir.Shape(each.shape)
    (answer,) = made.model.graph.outputs
    answer.shape = ir.Shape(["batch", *answer.shape[1:]])
    for node in made.model.graph.all_nodes():  # some were made on the way, by other lines
        node.metadata_props.pop("pkg.torch.onnx.stack_trace", None)
    made.model.metadata_props[FACTS] = json.dumps(facts)
    made.save(file)


def _drop_idle_squeezes(program: torch.export.ExportedProgram) -> None:
    """torch leaves an axis of another length than 1 as it is (PixArt squeezes its tokens); ONNX
    refuses it."""
    for node in list(program.graph.nodes):
        if node.target is not torch.ops.aten.squeeze.dim:
            continue
        source, axis = node.args
        length = source.meta["val"].shape[axis]
        if isinstance(length, int) and length != 1:
            node.replace_all_uses_with(source)
            program.graph.erase_node(node)


def check_onnx() -> None:
    """Before anything is written."""
    try:
        import onnx  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise missing_extra(str(error.name), "onnx") from error


def _refused(graph: Graph | Decoder, way: str, error: Exception) -> UserError:
    inner: Any = graph.codec.autoencoder if isinstance(graph, Decoder) else graph.network.model
    return UserError(
        f"a {type(inner).__name__} cannot go through {way} ({one_line(error)}): hand it on with "
        "--format diffusers"
    )


@contextmanager
def quiet() -> Iterator[None]:
    """Exporters warn of what is no concern of whoever waits for their file."""
    logger = logging.getLogger("torch.onnx")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(before)
