"""Detectors: networks whose features images are compared by.

A detector has a name, the digest of its weights and the exact line of its preprocessing: distances
from detectors that differ in any of the three are different metrics. What is published under a
name is only made with the weights and the preprocessing that the name stands for.
"""

import io
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Protocol

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from stillhouse.config import Config
from stillhouse.errors import UserError, missing_extra, one_line
from stillhouse.metrics import networks
from stillhouse.metrics.exact import exactly
from stillhouse.metrics.networks import find_weights, load_weights, ready, sha256
from stillhouse.metrics.preprocessing import CLIP, IMAGENET, Preprocessing, check_images
from stillhouse.metrics.pretrained import load_pretrained

Device = torch.device | str
TEXTS = 64  # that are encoded at once


class Output(NamedTuple):
    """What a detector sees."""

    features: Tensor  # [B, D] float32
    logits: Tensor | None  # [B, classes] float32, where the network is a classifier


class Detector(Protocol):
    """uint8 images [B, 3, H, W] of any size to features; the same for any split into batches."""

    @property
    def name(self) -> str: ...  # as in "FD-<name>"
    @property
    def dims(self) -> int: ...
    @property
    def classes(self) -> int: ...  # of its logits; 0 if it is no classifier
    @property
    def digest(self) -> str: ...  # of the weights
    @property
    def preprocessing(self) -> str: ...  # one exact line

    def __call__(self, images: Tensor) -> Output: ...


@dataclass(frozen=True, eq=False)
class NetworkDetector:
    """A detector made of a preprocessing and a network."""

    name: str
    dims: int
    digest: str
    preprocessing: str
    device: torch.device
    see: Callable[[Tensor], Output]  # uint8 images on the device to features
    classes: int = field(default=0, kw_only=True)

    def __call__(self, images: Tensor) -> Output:
        check_images(images)
        with exactly(self.device):
            return self.see(images.to(self.device))


# ---------------------------------------------------------------- networks with weights in a file


class MobileNetV2Config(Config):
    """ImageNet features, 1280 of them; small and quick. Not FID: FD-MobileNetV2."""

    kind: Literal["mobilenet-v2"] = "mobilenet-v2"
    weights: str = ""
    """A safetensors file; empty: mobilenet_v2.safetensors in the folder $STILLHOUSE_WEIGHTS."""

    def build(self, device: Device = "cpu") -> Detector:
        prepare = Preprocessing(128, "bilinear", *IMAGENET)
        return _from_file(
            networks.MobileNetV2(), "MobileNetV2", "mobilenet_v2", self.weights, prepare, device
        )


class ResNet56Config(Config):
    """A classifier of CIFAR-10: 64 features, 10 classes. Not FID: FD-ResNet56.

    It was trained with CIFAR-10's labels, so it favours recognisable classes.
    """

    kind: Literal["resnet56-cifar10"] = "resnet56-cifar10"
    weights: str = ""
    """A safetensors file; empty: resnet56_cifar10.safetensors in the folder $STILLHOUSE_WEIGHTS."""

    def build(self, device: Device = "cpu") -> Detector:
        # It was trained with ImageNet's mean and std, not with CIFAR-10's.
        prepare = Preprocessing(32, "bilinear", *IMAGENET)
        return _from_file(
            networks.ResNet56(), "ResNet56", "resnet56_cifar10", self.weights, prepare, device
        )


def _from_file(
    network: networks.MobileNetV2 | networks.ResNet56,
    name: str,
    file: str,
    given: str,
    prepare: Preprocessing,
    device: Device,
) -> NetworkDetector:
    path = find_weights(given, f"{file}.safetensors", "--detector.weights")
    digest = load_weights(network, path)
    run = ready(network, device)

    def see(images: Tensor) -> Output:
        found = run(prepare(images).contiguous(memory_format=torch.channels_last))
        return Output(found, None) if isinstance(found, Tensor) else Output(*found)

    return NetworkDetector(
        name,
        network.dims,
        digest,
        str(prepare),
        torch.device(device),
        see,
        classes=network.classes,
    )


# ---------------------------------------------------------------- Inception, as FID has it

STANDARD = "6726825d"  # how the digest of the standard weights begins; also part of their file name
INCEPTION = (
    "torch-fidelity's: whole image to 299x299 px, bilinear as TensorFlow 1 (no antialias), "
    "not rounded; (x - 128) / 128"
)


class InceptionConfig(Config):
    """Inception-v3 of 2015, through torch-fidelity: the detector of FID, KID, Inception score."""

    kind: Literal["inception"] = "inception"
    weights: str = ""
    """weights-inception-2015-12-05-6726825d.pth; empty: downloaded. With others it is no FID."""

    def build(self, device: Device = "cpu") -> Detector:
        """2048 features before the last layer and 1008 logits without its bias."""
        module = _torch_fidelity()
        path = (
            Path(self.weights).expanduser() if self.weights else _download(module.URL_INCEPTION_V3)
        )
        content = _read(path)
        digest, network = sha256(content), _inception(module, path, content)
        name = "Inception"
        if not digest.startswith(f"sha256:{STANDARD}"):
            if not self.weights:
                raise UserError(f"{path} is damaged: remove it, and it is downloaded again")
            name = "Inception (own weights)"
            warnings.warn(
                f"{path} is not the standard Inception (its SHA-256 does not begin with {STANDARD})"
                ": distances from its features are not FID and compare with no published number",
                stacklevel=2,
            )
        run = network.to(device)
        return NetworkDetector(
            name,
            2048,
            digest,
            INCEPTION,
            torch.device(device),
            lambda images: Output(*run(images)),
            classes=1008,
        )


def _torch_fidelity() -> Any:
    try:
        from torch_fidelity import (  # pyright: ignore[reportMissingImports]
            feature_extractor_inceptionv3,
        )
    except ImportError:
        raise missing_extra("torch-fidelity", "metrics") from None
    except RuntimeError as error:  # torchvision, which it imports, was built for another torch
        raise UserError(
            f"torch-fidelity cannot be imported ({one_line(error)}): install the torchvision that "
            f"fits torch {torch.__version__}"
        ) from error
    return feature_extractor_inceptionv3


def _download(url: str) -> Path:
    """To where torch-fidelity has it; its own download would unpickle whatever arrives."""
    path = Path(torch.hub.get_dir()) / "checkpoints" / url.rpartition("/")[2]
    if path.is_file():
        return path
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.hub.download_url_to_file(url, str(path), hash_prefix=STANDARD, progress=False)
    except (OSError, RuntimeError) as error:  # no network, no disk; or a digest that is wrong
        raise UserError(
            f"the weights of Inception could not be downloaded ({one_line(error)}). Fetch {url} "
            "yourself and name the file with --detector.weights"
        ) from error
    return path


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"there are no weights at {path} ({error.strerror})") from error


def _inception(module: Any, path: Path, content: bytes) -> nn.Module:
    """torch-fidelity unpickles the file it is given, so it is given one that we have written."""
    from pickle import UnpicklingError

    checked = io.BytesIO()
    try:
        torch.save(torch.load(io.BytesIO(content), map_location="cpu", weights_only=True), checked)
        checked.seek(0)
        return module.FeatureExtractorInceptionV3(
            "inception-v3-compat", ["2048", "logits_unbiased"], checked
        )
    except (UnpicklingError, RuntimeError, EOFError, TypeError, ValueError) as error:
        raise UserError(
            f"{path} does not hold the weights of torch-fidelity's Inception as plain tensors "
            f"({one_line(error)})"
        ) from error


# ---------------------------------------------------------------- transformers


class Dinov2Config(Config):
    """DINOv2, the detector of FD-DINOv2 (Stein et al. 2023): the CLS token of ViT-L/14."""

    kind: Literal["dinov2"] = "dinov2"
    model: str = "facebook/dinov2-large"
    """A hub id, or a folder that transformers has saved; safetensors only."""

    def build(self, device: Device = "cpu") -> Detector:
        from transformers import Dinov2Model

        loaded = load_pretrained(Dinov2Model, "dinov2", self.model)
        run, config = loaded.model.to(device), loaded.model.config
        prepare = Preprocessing(224, "bicubic", *IMAGENET)
        _fix_positions(run.embeddings, prepare.size // config.patch_size)
        standard = (config.hidden_size, config.num_hidden_layers, config.patch_size)
        name = "DINOv2" if standard == (1024, 24, 14) else f"DINOv2 ({config.hidden_size}-d)"
        return NetworkDetector(
            name,
            config.hidden_size,
            loaded.digest,
            f"{prepare}; CLS token after the last norm",
            torch.device(device),
            lambda images: Output(run(prepare(images)).pooler_output.float(), None),
        )


def _fix_positions(embeddings: Any, side: int, offset: float = 0.1) -> None:
    """Interpolates the position embeddings once, as the published DINOv2 does.

    It scales the grid by (side + 0.1) / M where transformers takes side / M: positions at the far
    end differ by a quarter of a patch, and published distances were made with the former.
    """
    first, grid = embeddings.position_embeddings[:, :1], embeddings.position_embeddings[:, 1:]
    trained = round(grid.shape[1] ** 0.5)
    if side == trained:
        return
    grid = grid.reshape(1, trained, trained, -1).permute(0, 3, 1, 2)
    grid = F.interpolate(grid, scale_factor=(side + offset) / trained, mode="bicubic")
    grid = grid.permute(0, 2, 3, 1).reshape(1, side * side, -1)
    embeddings.position_embeddings = nn.Parameter(torch.cat([first, grid], 1), requires_grad=False)


class ClipConfig(Config):
    """CLIP, the detector of CMMD (Jayasumana et al. 2024) and CLIP score: ViT-L/14 at 336 px."""

    kind: Literal["clip"] = "clip"
    model: str = "openai/clip-vit-large-patch14-336"
    """A hub id, or a folder that transformers has saved; safetensors only."""

    def build(self, device: Device = "cpu") -> "ClipDetector":
        from transformers import CLIPModel

        loaded = load_pretrained(CLIPModel, "clip", self.model)
        run = loaded.model.to(device)
        vision, dims = run.config.vision_config, run.config.projection_dim
        prepare = Preprocessing(vision.image_size, "bicubic", *CLIP, crop=True)
        standard = (vision.image_size, vision.patch_size, vision.num_hidden_layers, dims)
        name = "CLIP" if standard == (336, 14, 24, 768) else f"CLIP ({dims}-d, {prepare.size} px)"

        def see(images: Tensor) -> Output:
            found = run.get_image_features(pixel_values=prepare(images)).pooler_output
            return Output(F.normalize(found.float()), None)

        line = f"{prepare}; image embedding of length 1"
        where = torch.device(device)
        return ClipDetector(name, dims, loaded.digest, line, where, see, run, loaded.folder)


@dataclass(frozen=True, eq=False)
class ClipDetector(NetworkDetector):
    """Also encodes text, into the space of the images."""

    model: Any
    folder: Path

    @cached_property
    def tokenizer(self) -> Any:
        from transformers import CLIPTokenizer

        # transformers makes up an empty tokenizer where there is none.
        present = {path.name for path in self.folder.iterdir()}
        if "tokenizer.json" not in present and not {"vocab.json", "merges.txt"} <= present:
            raise UserError(
                f"{self.folder} has no tokenizer.json: texts need the model's tokenizer"
            )
        try:
            return CLIPTokenizer.from_pretrained(self.folder, local_files_only=True)
        except Exception as error:  # whatever its backend raises
            raise UserError(
                f"the tokenizer in {self.folder} cannot be read ({one_line(error)})"
            ) from error

    def encode_text(self, texts: Sequence[str]) -> Tensor:
        """[B, D] of length 1; words beyond the model's context are cut off, as CLIP does."""
        if not texts:
            raise ValueError("there are no texts to encode")
        parts = [texts[at : at + TEXTS] for at in range(0, len(texts), TEXTS)]
        return torch.cat([self._encode(part) for part in parts])

    def _encode(self, texts: Sequence[str]) -> Tensor:
        tokens = self.tokenizer(
            list(texts),
            padding="max_length",
            max_length=self.model.config.text_config.max_position_embeddings,
            truncation=True,
            return_tensors="pt",
        ).to(self.device)
        with exactly(self.device):
            found = self.model.get_text_features(tokens.input_ids, tokens.attention_mask)
        return F.normalize(found.pooler_output.float())


DetectorConfig = Annotated[
    InceptionConfig | Dinov2Config | ClipConfig | MobileNetV2Config | ResNet56Config,
    Field(discriminator="kind"),
]
