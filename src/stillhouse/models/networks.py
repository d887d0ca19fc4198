"""diffusers' networks as `network(x, time, cond)`: one calling convention per class.

| class | condition fields it reads |
|---|---|
| `UNet2DModel` | label (if class-conditional) |
| `UNet2DConditionModel` | text, text_mask, label; pooled + control: SDXL's text_embeds, time_ids |
| `DiTTransformer2DModel` | label |
| `MDTTransformer2DModel` (ours) | label, hidden |
| `PixArtTransformer2DModel` | text, text_mask; control = (height, width, aspect ratio) at 1024 px |
| `SD3Transformer2DModel` | text, pooled |
| `PlaneNetwork` (ours, for 2-D toys) | label (if class-conditional) |

With a `Conditioning` beside it a network also reads what that does: control, steps, labels as
tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from stillhouse.models.conditioning import Conditioning, Parts, taken_apart
from stillhouse.models.positions import data_size
from stillhouse.process import Condition

Shapes = dict[str, tuple[int | None, ...]]  # a condition field's shape per sample; None is free


def _present(**arguments: Any) -> dict[str, Any]:
    return {name: value for name, value in arguments.items() if value is not None}


def _cast(value: Tensor | None, x: Tensor) -> Tensor | None:
    if value is None:
        return None
    return value.to(x.device, x.dtype if value.is_floating_point() else None)


# ---------------------------------------------------------------- how each class is called


def _call_unet(model: nn.Module, x: Tensor, time: Tensor, cond: Condition) -> Tensor:
    time = time.T if time.ndim == 2 else time  # with a vector, as `HandsVectorOn` takes it
    return model(x, time, **_present(class_labels=cond.label)).sample


def _call_conditional_unet(model: Any, x: Tensor, time: Tensor, cond: Condition) -> Tensor:
    added = None
    if model.config.addition_embed_type == "text_time":
        added = {"text_embeds": cond.pooled, "time_ids": cond.control}
    time, beside = taken_apart(time)
    optional = _present(
        class_labels=cond.label,
        encoder_attention_mask=cond.text_mask,
        added_cond_kwargs=added,
        timestep_cond=beside,
    )
    return model(x, time, encoder_hidden_states=cond.text, **optional).sample


def _call_dit(model: nn.Module, x: Tensor, time: Tensor, cond: Condition) -> Tensor:
    return model(x, timestep=time, class_labels=cond.label).sample


def _call_mdt(model: nn.Module, x: Tensor, time: Tensor, cond: Condition) -> Tensor:
    return model(x, timestep=time, class_labels=cond.label, mask=cond.hidden).sample


def _call_pixart(model: Any, x: Tensor, time: Tensor, cond: Condition) -> Tensor:
    sizes = {"resolution": None, "aspect_ratio": None}
    if model.use_additional_conditions and cond.control is not None:
        sizes = {"resolution": cond.control[:, :2], "aspect_ratio": cond.control[:, 2:]}
    return model(
        x,
        encoder_hidden_states=cond.text,
        encoder_attention_mask=cond.text_mask,
        timestep=time,
        added_cond_kwargs=sizes,
    ).sample


def _call_sd3(model: Any, x: Tensor, time: Tensor, cond: Condition) -> Tensor:
    pooled = cond.pooled
    if pooled is None:  # text that goes through attention alone
        pooled = x.new_zeros(x.shape[0], model.config.pooled_projection_dim)
    return model(
        hidden_states=x,
        encoder_hidden_states=cond.text,
        pooled_projections=pooled,
        timestep=time,
    ).sample


def _call_plane(model: nn.Module, x: Tensor, time: Tensor, cond: Condition) -> Tensor:
    return model(x, time, cond.label)


# ---------------------------------------------------------------- what each class needs


def _unet_needs(model: Any) -> Shapes:
    return {"label": ()} if model.class_embedding is not None else {}


def _conditional_unet_needs(model: Any) -> Shapes:
    config = model.config
    needs: Shapes = {"text": (None, config.encoder_hid_dim or config.cross_attention_dim)}
    if config.addition_embed_type == "text_time":
        times = 6 * config.addition_time_embed_dim
        needs |= {
            "pooled": (config.projection_class_embeddings_input_dim - times,),
            "control": (6,),
        }
    return needs | _unet_needs(model)


def _dit_needs(model: Any) -> Shapes:
    return {"label": ()}


def _pixart_needs(model: Any) -> Shapes:
    needs: Shapes = {"text": (None, model.config.caption_channels)}
    return needs | ({"control": (3,)} if model.use_additional_conditions else {})


def _sd3_needs(model: Any) -> Shapes:
    config = model.config
    return {"text": (None, config.joint_attention_dim), "pooled": (config.pooled_projection_dim,)}


def _plane_needs(model: Any) -> Shapes:
    return {"label": ()} if model.label is not None else {}


@dataclass(frozen=True)
class Convention:
    """How a class of networks is called and which condition fields it cannot do without."""

    call: Callable[[Any, Tensor, Tensor, Condition], Tensor]
    needs: Callable[[Any], Shapes]
    classes: str = "num_class_embeds"  # the config key that counts class labels
    has_null: bool = False  # one label beyond the classes stands for none
    convolutional: bool = False  # faster with channels last
    square: bool = False  # puts its patches together as a square
    # A module that its forward calls a second time from outside its block; sharding must know.
    called_apart: str = ""


NETWORKS: dict[str, Convention] = {
    "UNet2DModel": Convention(_call_unet, _unet_needs, convolutional=True),
    "UNet2DConditionModel": Convention(
        _call_conditional_unet, _conditional_unet_needs, convolutional=True
    ),
    "DiTTransformer2DModel": Convention(
        _call_dit,
        _dit_needs,
        "num_embeds_ada_norm",
        has_null=True,
        square=True,
        called_apart="transformer_blocks.0.norm1.emb",
    ),
    "MDTTransformer2DModel": Convention(
        _call_mdt, _dit_needs, "num_embeds_ada_norm", has_null=True
    ),
    "PixArtTransformer2DModel": Convention(_call_pixart, _pixart_needs),
    "SD3Transformer2DModel": Convention(_call_sd3, _sd3_needs),
    "PlaneNetwork": Convention(_call_plane, _plane_needs),
}


def convention_of(model: nn.Module) -> Convention:
    """Along the bases: sharding makes a subclass of a model's own class."""
    names = [base.__name__ for base in type(model).__mro__]
    known = [name for name in names if name in NETWORKS]
    if not known:
        raise ValueError(f"cannot call a {names[0]}; supported: {', '.join(NETWORKS)}")
    return NETWORKS[known[0]]


def attended_width(model: nn.Module) -> int:
    """Numbers per token that its attention takes; 0 where it takes none."""
    return (convention_of(model).needs(model).get("text") or (0, 0))[1] or 0


class DiffusersNetwork(nn.Module):
    """A diffusers model behind the one calling convention of adapters."""

    def __init__(
        self,
        model: nn.Module,
        null_label: int | None = None,
        conditioning: Conditioning | None = None,
    ) -> None:
        """`null_label` is one of the labels that a U-Net knows; a DiT has one of its own."""
        super().__init__()
        self.model = model
        self.conditioning = conditioning
        self.convention = convention_of(model)
        if conditioning is not None and conditioning.tokens is not None:
            null_label = conditioning.parts.classes
        self.null_label = self.classes if self.convention.has_null else null_label
        """The label that stands for no class, None where there is none."""
        for part in model.modules():
            # DiT drops labels by itself in training, by a chance that no key decides.
            if type(part).__name__ == "LabelEmbedding":
                part.dropout_prob = 0.0  # pyright: ignore[reportArgumentType]
        if self.convention.called_apart:
            apart: Any = model.get_submodule(self.convention.called_apart)
            apart.called_apart = True

    @property
    def told(self) -> Parts:
        """What it is told beside what its own class takes."""
        return Parts() if self.conditioning is None else self.conditioning.parts

    @property
    def data_shape(self) -> tuple[int, ...]:
        """Channels, height and width that the model was made for; coordinates for a plane."""
        config: Any = self.model.config
        if "sample_size" not in config:
            return (config.in_channels,)
        size = data_size(self.model)
        if size is None:
            raise ValueError("the model's config does not say its sample_size: give a shape")
        height, width = (size, size) if isinstance(size, int) else size
        return config.in_channels, height, width

    @property
    def condition_shapes(self) -> Shapes:
        """The condition fields that a call must have, with their shape per sample."""
        needs = self.convention.needs(self.model)
        return needs if self.conditioning is None else self.conditioning.needs(needs)

    @property
    def classes(self) -> int | None:
        """How many class labels the model knows, None where it knows none."""
        if self.conditioning is not None and self.conditioning.tokens is not None:
            return self.conditioning.tokens.num_embeddings
        config: Any = self.model.config
        return config.get(self.convention.classes)

    def for_inference(self) -> "DiffusersNetwork":
        """Lays convolution weights out with channels last, in place: measured 8% faster on a CPU.

        Not in bfloat16 there: the same U-Net of 1.8M parameters then draws at a third of its speed.
        Not for training: sharding wants parameters in their plain order.
        """
        first = next(self.model.parameters())
        slow = first.device.type == "cpu" and first.dtype != torch.float32
        if self.convention.convolutional and not slow:
            self.model.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
        return self

    def forward(self, x: Tensor, time: Tensor, cond: Condition | None = None) -> Tensor:
        said = cond or Condition()
        missing = [f for f in self.condition_shapes if getattr(said, f) is None]
        if missing:
            wanted = ", ".join(f"{f} {['B', *self.condition_shapes[f]]}" for f in missing)
            raise ValueError(f"{type(self.model).__name__} needs a condition with {wanted}")
        if self.conditioning is not None:
            time, said = self.conditioning(time, said.to(x.device))
        given = said.map(lambda value: _cast(value, x))
        # Models that also predict a variance give it as further channels.
        return self.convention.call(self.model, x, time, given)[:, : x.shape[1]]
