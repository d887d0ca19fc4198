"""Networks to train, as configs: each builds a diffusers model for the data's shape and classes."""

from abc import ABC, abstractmethod
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, PositiveInt

from stillhouse.config import Config
from stillhouse.errors import UserError
from stillhouse.models import DiffusersNetwork
from stillhouse.models.backbones import Name, Size
from stillhouse.models.conditioning import Parts, conditioned
from stillhouse.models.networks import attended_width
from stillhouse.recipes.train.starting import check_process

if TYPE_CHECKING:
    from stillhouse.pipelines.schedules import Trained

Share = Annotated[float, Field(ge=0, lt=1)]


class NetworkConfig(Config, ABC):
    """What every choice gives."""

    @abstractmethod
    def build(
        self, shape: tuple[int, ...], classes: int, text_width: int = 0
    ) -> tuple[Any, int | None]:
        """The model, and the label for no class."""

    def network(
        self, shape: tuple[int, ...], classes: int, parts: Parts, text_width: int = 0
    ) -> DiffusersNetwork:
        """The same behind the one calling convention, told what `parts` say."""
        model, null = self.build(shape, classes, text_width)
        attends = attended_width(model)
        if attends and parts.text is None:
            parts = replace(parts, classes=classes)
        if not attends and not parts.layout.names:
            return DiffusersNetwork(model, null)
        try:
            return DiffusersNetwork(model, null, conditioned(model, parts, attends))
        except ValueError as error:
            raise UserError(
                f"{error}: choose --network backbone, or leave --data.control and "
                "--data.columns.styles out"
            ) from error


class UNet(NetworkConfig):
    """diffusers' UNet2DModel. One label more than there are classes stands for none."""

    kind: Literal["unet"] = "unet"
    channels: tuple[PositiveInt, ...] = (64, 128, 256)
    """Width at each level; each halves the resolution."""
    layers: PositiveInt = 2
    """Residual blocks per level."""
    attention: tuple[int, ...] = (2,)
    """Levels with self-attention, counted from 0 at full resolution."""
    head_width: PositiveInt = 32
    """Channels per head of attention."""
    dropout: Share = 0.0
    """Share of activations that are dropped in training."""

    def build(
        self, shape: tuple[int, ...], classes: int, text_width: int = 0
    ) -> tuple[Any, int | None]:
        from diffusers import UNet2DModel

        channels, size, _ = _image(shape, "unet")
        _takes_no_text(text_width)
        halvings = len(self.channels) - 1
        if size % 2**halvings:
            raise UserError(
                f"images of {size} pixels cannot be halved {halvings} times: choose another "
                "--data.image.size, or fewer --network.channels"
            )
        with_attention = [level in self.attention for level in range(len(self.channels))]
        model = UNet2DModel(
            sample_size=size,
            in_channels=channels,
            out_channels=channels,
            block_out_channels=self.channels,
            layers_per_block=self.layers,
            down_block_types=tuple(["DownBlock2D", "AttnDownBlock2D"][a] for a in with_attention),
            up_block_types=tuple(["UpBlock2D", "AttnUpBlock2D"][a] for a in with_attention[::-1]),
            attention_head_dim=self.head_width,
            norm_num_groups=_groups(self.channels),
            dropout=self.dropout,
            num_class_embeds=classes + 1 if classes else None,
        )
        return model, classes or None


class DiT(NetworkConfig):
    """diffusers' DiTTransformer2DModel (Peebles & Xie 2023)."""

    kind: Literal["dit"] = "dit"
    patch: PositiveInt = 2
    """Pixels a side of a token."""
    depth: PositiveInt = 12
    """Blocks."""
    heads: PositiveInt = 6
    """Of attention."""
    head_width: PositiveInt = 64
    """Channels per head."""
    dropout: Share = 0.0
    """Share of activations that are dropped in training."""

    def build(
        self, shape: tuple[int, ...], classes: int, text_width: int = 0
    ) -> tuple[Any, int | None]:
        from diffusers import DiTTransformer2DModel

        channels, size, _ = _image(shape, "dit")
        _takes_no_text(text_width)
        if size % self.patch:
            raise UserError(f"images of {size} pixels are not made of patches of {self.patch}")
        if not classes:
            raise UserError(
                "a DiT is told a class: name the column as --data.columns.label, or choose "
                "--network unet"
            )
        model = DiTTransformer2DModel(
            num_attention_heads=self.heads,
            attention_head_dim=self.head_width,
            in_channels=channels,
            out_channels=channels,
            num_layers=self.depth,
            sample_size=size,
            patch_size=self.patch,
            num_embeds_ada_norm=classes,
            dropout=self.dropout,
        )
        return model, classes


class Perceptron(NetworkConfig):
    """For points in the plane."""

    kind: Literal["perceptron"] = "perceptron"
    width: PositiveInt = 128
    """Of each layer."""
    depth: PositiveInt = 3
    """Layers."""

    def build(
        self, shape: tuple[int, ...], classes: int, text_width: int = 0
    ) -> tuple[Any, int | None]:
        from stillhouse.models.plane import PlaneNetwork

        _takes_no_text(text_width)
        if len(shape) != 1:
            raise UserError("a perceptron takes points, not images: choose --network unet or dit")
        known = classes + 1 if classes else None
        model = PlaneNetwork(*shape, *shape, self.width, self.depth, num_class_embeds=known)
        return model, classes or None


class Backbone(NetworkConfig):
    """One of five networks by name and size: see stillhouse.models.backbones.

    What to draw reaches unet, pixart and mmdit through attention: a caption, or a class as a learnt
    token. dit and mdt are told a class in their norms.
    """

    kind: Literal["backbone"] = "backbone"
    name: Name = "pixart"
    """Which network."""
    size: Size = "small"
    """Its widths and depth."""
    patch: PositiveInt = 2
    """Pixels a side of a token; not for unet."""
    token_width: PositiveInt = 128
    """Numbers per learnt token of a class, where there are no captions."""
    qk_norm: bool = False
    """For unet and pixart, which then no longer open in diffusers alone; mmdit always has it."""
    widths: tuple[PositiveInt, ...] = ()
    """For unet: of its levels, where they are not those of the size; each halves the resolution."""
    masked: bool = True
    """For mdt: every image is learnt a second time with 30 to 50% of its tokens hidden."""

    def build(
        self, shape: tuple[int, ...], classes: int, text_width: int = 0
    ) -> tuple[Any, int | None]:
        from stillhouse.models.backbones import BACKBONES

        channels, size, _ = _image(shape, "backbone")
        chosen = BACKBONES[self.name]
        options: dict[str, Any] = {} if self.name == "unet" else {"patch": self.patch}
        if chosen.takes == "classes":
            _takes_no_text(text_width)
            if not classes:
                raise UserError(
                    f"a {self.name} is told a class: name the column as --data.columns.label, or "
                    "choose another --network.name"
                )
            options["classes"] = classes
        else:
            if not text_width and not classes:
                raise UserError(
                    f"a {self.name} is told what to draw: give --text captions, or classes as "
                    "--data.columns.label"
                )
            options["token_width"] = text_width or self.token_width
        if self.widths:
            if self.name != "unet":
                raise UserError(
                    "--network.widths are those of the levels of a unet: leave them out"
                )
            options["widths"] = self.widths
        if self.qk_norm and self.name in ("unet", "pixart"):
            options["qk_norm"] = True
        model = chosen.build(self.size, channels=channels, resolution=size, **options)
        if self.name == "mdt" and not self.masked:
            model.leave_masks_alone()
        return model, classes or None


class Pretrained(NetworkConfig):
    """A checkpoint to go on from: the weights, not the optimiser."""

    kind: Literal["pretrained"] = "pretrained"
    path: str = ""
    """A diffusers directory or hub id."""

    def build(
        self, shape: tuple[int, ...], classes: int, text_width: int = 0
    ) -> tuple[Any, int | None]:
        network = self._load(shape, classes)
        return network.model, network.null_label

    def _load(self, shape: tuple[int, ...], classes: int) -> Any:
        from stillhouse.pipelines import load_denoiser

        if not self.path:
            raise UserError("name the checkpoint to go on from as --network.path")
        network: Any = load_denoiser(self.path).network
        if network.data_shape != shape:
            raise UserError(
                f"{self.path} was made for data of shape {network.data_shape}, not {shape}"
            )
        known = (network.classes or 0) - (network.null_label in range(network.classes or 0))
        if known != classes:
            raise UserError(f"{self.path} knows {known} classes, the data has {classes}")
        return network

    def network(
        self, shape: tuple[int, ...], classes: int, parts: Parts, text_width: int = 0
    ) -> DiffusersNetwork:
        found = self._load(shape, classes)
        ours = replace(parts, classes=found.told.classes, tokens=found.told.tokens)
        if found.told != ours:
            raise UserError(
                f"{self.path} was told otherwise what to draw than this run tells it: give the "
                "same --text, --data.control, --data.columns.styles and --detail"
            )
        return found

    def check(self, trained: "Trained") -> None:
        """Its weights mean nothing in another process than its own."""
        from stillhouse.pipelines import load_denoiser

        check_process(self.path, load_denoiser(self.path), trained)


NetworkChoice = Annotated[
    UNet | DiT | Perceptron | Backbone | Pretrained, Field(discriminator="kind")
]


def _image(shape: tuple[int, ...], kind: str) -> tuple[int, int, int]:
    if len(shape) != 3:
        raise UserError(f"a {kind} takes images: for points choose --network perceptron")
    channels, height, width = shape
    return channels, height, width


def _takes_no_text(text_width: int) -> None:
    if text_width:
        raise UserError(
            "this network takes no captions: choose --network backbone --network.name pixart, "
            "mmdit or unet"
        )


def _groups(channels: tuple[int, ...]) -> int:
    """Groups of normalisation that divide every width: 32 for the usual ones."""
    return next(n for n in (32, 16, 8, 4, 2, 1) if all(width % n == 0 for width in channels))
