"""How an exported graph is walked: the facts in its file, and scripts for those who have no torch.

Sample i of a script is sample i of `stillhouse sample --solver euler`: its noise follows from the
seed and i, by Philox of numpy.
"""

from collections.abc import Mapping
from typing import Any

import torch

from stillhouse.recipes.export.graphs import FACTS, Decoder, Graph
from stillhouse.recipes.subjects import Subject

USUAL = (5, 10, 20, 50)  # numbers of steps whose levels are written down
SHOWN = 8  # samples of a script, at most


def facts_of(graph: Graph, subject: Subject, steps: int) -> dict[str, Any]:
    """What a caller must know."""
    network = graph.network
    return {
        "contract": "denoise(x, sigma, ...) -> x0, where x = x0 + sigma * noise",
        "inputs": [each._asdict() for each in graph.inputs],
        "shape": list(subject.shape),
        "labels": list(subject.labels),
        "null_label": network.null_label,
        "control": list(network.told.layout.names),
        "walks": {str(n): walk_of(subject, n) for n in numbers_of(subject, steps)},
    }


def facts_of_decoder(decoder: Decoder) -> dict[str, Any]:
    """The same of the decoder."""
    codec = decoder.codec
    _, _, *sides = decoder.inputs[0].shape
    return {
        "contract": "decode(latents) -> image, from -1 to 1",
        "inputs": [each._asdict() for each in decoder.inputs],
        "shape": [codec.image_channels, *(codec.downscale * int(side) for side in sides)],
    }


def numbers_of(subject: Subject, steps: int) -> list[int]:
    """A student knows its own walks alone."""
    if subject.walk is not None:
        return sorted(subject.walk.evaluations)
    return sorted({n for n in (*USUAL, steps) if _possible(subject, n)})


def _possible(subject: Subject, steps: int) -> bool:
    try:
        subject.scaling.native_grid(steps)
    except ValueError:
        return False
    return True


def walk_of(subject: Subject, evaluations: int) -> dict[str, Any]:
    """Levels, what unit noise is multiplied by, and how a step is made."""
    scaling, walk, one = subject.scaling, subject.walk, torch.ones((), dtype=torch.float64)
    if walk is None:
        grid = scaling.native_grid(evaluations)
        return {
            "sigmas": grid.tolist(),
            "start": float(scaling.start(one, grid[0])),
            "step": "euler",
            "first_step_analytical": False,
            "steps": None,
        }
    grid = walk.levels(evaluations, scaling)
    return {
        "sigmas": grid.tolist(),
        "start": float(walk.grids(scaling).start(one, float(grid[0]))),
        "step": walk.step,
        "first_step_analytical": walk.afs,
        "steps": walk.timestamps(evaluations) if walk.told else None,
    }


# ---------------------------------------------------------------- without torch


def onnx_script(facts: Mapping[str, Any], evaluations: int, *, decoder: bool, count: int) -> str:
    """Draws with onnxruntime and numpy alone."""
    walk, names = facts["walks"][str(evaluations)], [each["name"] for each in facts["inputs"]]
    parts = [
        "import hashlib, json",
        "import numpy as np",
        "import onnxruntime",
        "",
        'session = onnxruntime.InferenceSession("denoiser.onnx")',
        f'facts = json.loads(session.get_modelmeta().custom_metadata_map["{FACTS}"])',
        f'walk = facts["walks"]["{evaluations}"]  # by the number of evaluations',
        f"count, seed = {count}, 0",
        "",
        "def noise(purpose):",
        "    rows = []",
        "    for i in range(count):",
        '        key = hashlib.blake2b(f"{seed}/{i}/{purpose}".encode(), digest_size=16).digest()',
        "        bits = np.random.Generator(np.random.Philox(key=np.frombuffer(key, np.uint64)))",
        '        rows.append(bits.standard_normal(facts["shape"], np.float32))',
        "    return np.stack(rows)",
        "",
        *_told(facts, names, walk),
        'x = np.float32(walk["start"]) * noise("start")',
        'sigmas = walk["sigmas"]',
        "for i, (sigma, lower) in enumerate(zip(sigmas, sigmas[1:])):",
        *_step(walk),
        *_picture(facts, decoder),
    ]
    return "\n".join(parts)


def _told(facts: Mapping[str, Any], names: list[str], walk: Mapping[str, Any]) -> list[str]:
    """What the samples are told."""
    lines = ["told = {}"]
    fields = set(names) - {"x", "sigma", "steps"}
    if fields == {"label"}:
        lines.append('told["label"] = np.resize(facts["labels"], count)  # classes in turn')
    elif fields:
        lines.append('told.update({k: v[:count] for k, v in np.load("told.npz").items()})')
    if "steps" in names:
        lines.append(f'told["steps"] = np.full(count, {walk["steps"] or 0})')
    return lines


def _step(walk: Mapping[str, Any]) -> list[str]:
    call = [
        'inputs = {"x": x, "sigma": np.full(count, sigma, np.float32), **told}',
        'x0 = session.run(["x0"], inputs)[0]',
    ]
    lines = call
    if walk["first_step_analytical"]:
        far = "x0 = x - np.float32(sigma / np.sqrt(1 + sigma**2)) * x  # from afar: no evaluation"
        lines = ["if i == 0:", f"    {far}", "else:", *(f"    {line}" for line in call)]
    if walk["step"] == "renoise":
        lines = [
            *lines,
            "end = sigmas[-1]",
            "x = np.float32(end / sigma) * x + np.float32(1 - end / sigma) * x0",
            "if lower > end:",
            '    x = x + np.float32(np.sqrt(lower**2 - end**2)) * noise(f"solver/{i}")',
        ]
    else:
        lines = [
            *lines,
            "x = np.float32(lower / sigma) * x + np.float32(1 - lower / sigma) * x0  # Euler",
        ]
    return [f"    {line}" for line in lines]


def _picture(facts: Mapping[str, Any], decoder: bool) -> list[str]:
    lines = ["np.save('samples.npy', x)"]
    if decoder:
        lines = [
            'decoder = onnxruntime.InferenceSession("decoder.onnx")',
            'x = decoder.run(["image"], {"latents": x})[0]',
            *lines,
        ]
    if len(facts["shape"]) == 3 and (decoder or facts["shape"][0] in (1, 3)):
        lines += [
            "pixels = ((x.clip(-1, 1) + 1) * 127.5).round().astype(np.uint8)",
            "row = np.concatenate(list(pixels.transpose(0, 2, 3, 1)), 1)  # side by side",
            "row = np.broadcast_to(row, (*row.shape[:2], 3))",
            "with open('samples.ppm', 'wb') as file:",
            '    file.write(b"P6 %d %d 255\\n" % (row.shape[1], row.shape[0]) + row.tobytes())',
        ]
    return lines


# ---------------------------------------------------------------- with torch alone


def torch_script(facts: Mapping[str, Any], evaluations: int) -> str:
    """How a .pt2 is called; the loop is the same."""
    names = ", ".join(each["name"] for each in facts["inputs"])
    return "\n".join(
        [
            "import json",
            "import torch",
            "",
            f'extra = {{"{FACTS}": ""}}',
            'denoise = torch.export.load("denoiser.pt2", extra_files=extra).module()',
            f'facts = json.loads(extra["{FACTS}"])',
            f'walk = facts["walks"]["{evaluations}"]  # its sigmas, and how it starts',
            f"# x0 = denoise({names})",
        ]
    )
