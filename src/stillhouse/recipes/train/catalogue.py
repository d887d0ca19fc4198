"""The recipes: named runs to start from. Each is a function of the scale.

| name | data | network | process |
|---|---|---|---|
| `toy-moons`, `-ring`, `-spiral`, `-checkerboard` | points in the plane | perceptron | EDM |
| `fashion-unet` | Fashion-MNIST, 28 px grey, 10 classes | U-Net | EDM |
| `cifar10-unet` | CIFAR-10, 32 px, 10 classes | U-Net | EDM |
| `cifar10-dit` | CIFAR-10, 32 px, 10 classes | DiT | flow |
| `cifar10-mmdit` | CIFAR-10, 32 px, 10 classes as tokens, flips told | mmDiT | flow |
| `emoji` | emoji of three styles, 32 px, captions as text | U-Net, cross-attention | flow |
| `emoji-latent` | the same, 64 px, in the latents of TAESD3 | U-Net, cross-attention | flow |
| `pets-latent`, `birds-latent` | photos, 64 px, 37 and 200 classes, likewise | the same | flow |
| `cifar10-progressive` | CIFAR-10, 16 then 32 px | DiT | flow |
| `pets-progressive` | pets, 64 then 128 px, in latents | mmDiT | flow |
| `images` | a folder of your own | U-Net | EDM |
| `finetune`, `finetune-lora` | a captioned folder of your own | that of a pipeline | its own |
| `finetune-immiscible` | the same, noise assigned | Stable Diffusion 1.4's | its own |

`tiny` shows in about a minute on two cores that all of it works; `full` is meant to be used.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Literal

from stillhouse.couplings.configs import AssignmentConfig
from stillhouse.data import Columns, ControlConfig, DataConfig, Folder, ImageConfig, PointsConfig
from stillhouse.data.points import Toy
from stillhouse.engine.ema import HalfLife
from stillhouse.engine.optimisers import AdamW, Constant, Cosine
from stillhouse.engine.sharding import Spread
from stillhouse.objectives.configs import DenoisingConfig, FlowConfig, LogNormal
from stillhouse.recipes.known_data import codec, columns, parquet
from stillhouse.recipes.prompting import PipelineText
from stillhouse.recipes.telling import CaptionText, NoText
from stillhouse.recipes.train.networks import Backbone, DiT, Perceptron, UNet
from stillhouse.recipes.train.processes import Edm, Own, RectifiedFlow
from stillhouse.recipes.train.progressive import Stage
from stillhouse.recipes.train.training import TrainRun
from stillhouse.recipes.train.tuning import OwnObjective, Tuned
from stillhouse.recipes.train.watching import Preview, Validation

Scale = Literal["tiny", "full"]


def toy(name: Toy, scale: Scale) -> TrainRun:
    images = {"tiny": 200_000, "full": 2_000_000}[scale]
    return TrainRun(
        data=PointsConfig(toy=name),
        network=Perceptron(),
        process=Edm(sigma_data=0.7),
        images=images,
        batch=500,
        optim=AdamW(lr=2e-3, schedule=Cosine()),
        averages=(HalfLife(images=images / 20),),
        log_every=images // 50,
        checkpoint_every=images // 4,
        preview=Preview(every=images // 5, count=1000, steps=30),
        validation=Validation(every=images // 5, images=5000),
        out=Path(f"runs/toy-{name}"),
    )


def fashion_unet(scale: Scale) -> TrainRun:
    images, every = {"tiny": (2_560, 1_280), "full": (230_400, 32_000)}[scale]
    tiny = scale == "tiny"
    return TrainRun(
        data=DataConfig(
            source=parquet("fashion", "train"),
            columns=columns("fashion"),
            image=ImageConfig(size=28, mode="grey"),
        ),
        classes=10,
        network=UNet(channels=(16, 32, 32) if tiny else (48, 96, 128), layers=1, head_width=16),
        process=Edm(sigma_data=0.7),
        objective=DenoisingConfig(density=LogNormal(mean=-0.9, std=1.3)),
        spread=Spread(precision="fp32" if tiny else "bf16"),
        images=images,
        batch=64,
        optim=AdamW(
            lr=1e-3 if tiny else 5e-4,
            warmup=0 if tiny else 8_000,
            schedule=Constant() if tiny else Cosine(),
        ),
        averages=(HalfLife(images=100 if tiny else 20_000),),
        log_every=640 if tiny else 3_200,
        checkpoint_every=every,
        preview=Preview(every=every),
        validation=Validation(every=every, source=parquet("fashion", "test")),
        out=Path("runs/fashion-unet"),
    )


def cifar10(scale: Scale) -> TrainRun:
    """What both CIFAR-10 recipes share."""
    images, every = {"tiny": (1_280, 640), "full": (20_000_000, 256_000)}[scale]
    tiny = scale == "tiny"
    return TrainRun(
        data=DataConfig(
            source=parquet("cifar10", "train"),
            columns=columns("cifar10"),
            image=ImageConfig(size=32, flip=True),
        ),
        classes=10,
        images=images,
        batch=32 if tiny else 256,
        averages=(HalfLife(images=images / 20 if tiny else 500_000),),
        log_every=320 if tiny else 10_240,
        checkpoint_every=every,
        preview=Preview(every=every),
        validation=Validation(every=every, source=parquet("cifar10", "test")),
    )


def cifar10_unet(scale: Scale) -> TrainRun:
    tiny = scale == "tiny"
    network = (
        UNet(channels=(16, 32, 32), layers=1, head_width=16)
        if tiny
        else UNet(channels=(128, 256, 256), layers=3, attention=(1,), head_width=64, dropout=0.13)
    )
    return cifar10(scale).model_copy(
        update={
            "network": network,
            "process": Edm(sigma_data=0.5),
            "optim": AdamW(lr=1e-3 if tiny else 5e-4, warmup=0 if tiny else 500_000),
            "out": Path("runs/cifar10-unet"),
        }
    )


def cifar10_dit(scale: Scale) -> TrainRun:
    small, large = DiT(patch=4, depth=2, heads=2, head_width=32), DiT(patch=2)
    return cifar10_transformer(scale, small if scale == "tiny" else large, "dit")


def cifar10_mmdit(scale: Scale) -> TrainRun:
    """Semantics through attention, control through time: a class is a token, a flip is told."""
    tiny = scale == "tiny"
    network = Backbone(name="mmdit", size="tiny" if tiny else "S", patch=4 if tiny else 2)
    run = cifar10_transformer(scale, network, "mmdit")
    data = run.data.model_copy(update={"control": ControlConfig(composition=("flip",))})
    return run.model_copy(update={"data": data})


def cifar10_transformer(scale: Scale, network: DiT | Backbone, name: str) -> TrainRun:
    tiny = scale == "tiny"
    return cifar10(scale).model_copy(
        update={
            "network": network,
            "process": RectifiedFlow(),
            "objective": FlowConfig(),
            "spread": Spread(precision="bf16"),
            "optim": AdamW(lr=1e-3 if tiny else 3e-4, warmup=0 if tiny else 500_000),
            "out": Path(f"runs/cifar10-{name}"),
        }
    )


def emoji(scale: Scale) -> TrainRun:
    """Text to image on a laptop: captions through attention, the style as a control."""
    images, every = {"tiny": (640, 320), "full": (400_000, 40_000)}[scale]
    tiny = scale == "tiny"
    return TrainRun(
        data=DataConfig(
            source=parquet("emoji", "train"),
            columns=columns("emoji"),
            image=ImageConfig(size=32),
        ),
        text=CaptionText(),
        network=Backbone(name="unet", size="tiny" if tiny else "small"),
        process=RectifiedFlow(),
        objective=FlowConfig(),
        spread=Spread(precision="fp32" if tiny else "bf16"),
        images=images,
        batch=32 if tiny else 64,
        optim=AdamW(
            lr=1e-3 if tiny else 5e-4,
            warmup=0 if tiny else 8_000,
            schedule=Constant() if tiny else Cosine(),
        ),
        averages=(HalfLife(images=100 if tiny else 20_000),),
        log_every=320 if tiny else 3_200,
        checkpoint_every=every,
        preview=Preview(every=every),
        out=Path("runs/emoji"),
    )


def emoji_latent(scale: Scale) -> TrainRun:
    """Twice the pixels a side and a quarter of the numbers: 16 x 8 x 8."""
    run = emoji(scale)
    return run.model_copy(
        update={
            "data": run.data.model_copy(update={"image": ImageConfig(size=64)}),
            "codec": codec("taesd3"),
            "network": Backbone(name="unet", size="tiny" if scale == "tiny" else "small"),
            "out": Path("runs/emoji-latent"),
        }
    )


def photos_latent(name: Literal["pets", "birds"], classes: int, scale: Scale) -> TrainRun:
    """Photos of classes, which reach the network as learnt tokens."""
    run = emoji_latent(scale)
    return run.model_copy(
        update={
            "data": DataConfig(
                source=parquet(name, "train"),
                columns=columns(name),
                image=ImageConfig(size=64, flip=True),
            ),
            "classes": classes,
            "text": NoText(),
            "validation": Validation(every=run.preview.every, source=parquet(name, "test")),
            "out": Path(f"runs/{name}-latent"),
        }
    )


def cifar10_progressive(scale: Scale) -> TrainRun:
    """A quarter of the tokens, and of the cost of an image, for most of the way."""
    run, tiny = cifar10_dit(scale), scale == "tiny"
    low, high = (640, 640) if tiny else (80_000_000, 20_000_000)
    stages = (Stage(size=16, images=low), Stage(size=32, images=high))
    return run.model_copy(update={"stages": stages, "out": Path("runs/cifar10-progressive")})


def pets_progressive(scale: Scale) -> TrainRun:
    """The same in latents, 64 to 128 pixels."""
    run, tiny = photos_latent("pets", 37, scale), scale == "tiny"
    low, high = (320, 320) if tiny else (1_600_000, 400_000)
    return run.model_copy(
        update={
            "network": Backbone(name="mmdit", size="tiny" if tiny else "S", patch=2),
            "stages": (Stage(size=64, images=low), Stage(size=128, images=high)),
            "out": Path("runs/pets-progressive"),
        }
    )


def images(scale: Scale) -> TrainRun:
    """A folder of one's own, at 64 pixels."""
    count = {"tiny": 512, "full": 2_000_000}[scale]
    tiny = scale == "tiny"
    return TrainRun(
        data=DataConfig(source=Folder(), image=ImageConfig(size=32 if tiny else 64, flip=True)),
        network=UNet(channels=(16, 32, 32), layers=1, head_width=16)
        if tiny
        else UNet(channels=(64, 128, 192, 256), attention=(2, 3)),
        images=count,
        batch=16 if tiny else 64,
        optim=AdamW(lr=1e-3 if tiny else 3e-4, warmup=0 if tiny else 20_000),
        averages=(HalfLife(images=count / 20),),
        log_every=128 if tiny else 6_400,
        checkpoint_every=256 if tiny else 64_000,
        preview=Preview(every=256 if tiny else 64_000),
        out=Path("runs/images"),
    )


def finetune(scale: Scale) -> TrainRun:
    """A pipeline of one's own (--model) on a captioned folder: all weights of its network."""
    count, every = {"tiny": (16, 16), "full": (64_000, 8_000)}[scale]
    tiny = scale == "tiny"
    return TrainRun(
        data=DataConfig(source=Folder(), columns=Columns(text="text"), image=ImageConfig(size=512)),
        network=Tuned(),
        process=Own(),
        objective=OwnObjective(),
        text=PipelineText(),
        encode_once=True,
        spread=Spread(precision="fp32" if tiny else "bf16"),
        images=count,
        batch=4 if tiny else 16,
        optim=AdamW(lr=1e-5, warmup=0 if tiny else 8_000),
        averages=(),
        log_every=8 if tiny else 320,
        checkpoint_every=every,
        preview=Preview(every=every, count=2 if tiny else 8, steps=2 if tiny else 20),
        out=Path("runs/finetune"),
    )


def finetune_lora(scale: Scale) -> TrainRun:
    """Adapters alone, at ten times the learning rate: a few megabytes."""
    run = finetune(scale)
    return run.model_copy(
        update={
            "network": Tuned(method="lora"),
            "optim": run.optim.model_copy(update={"lr": 1e-4}),
            "out": Path("runs/finetune-lora"),
        }
    )


def finetune_immiscible(scale: Scale) -> TrainRun:
    """Li et al. 2024, the fine-tuning of Stable Diffusion 1.4: batches of 512, 5000 steps."""
    run = finetune(scale)
    return run.model_copy(
        update={
            "model": "CompVis/stable-diffusion-v1-4",
            "coupling": AssignmentConfig(),
            "batch": 4 if scale == "tiny" else 512,
            "images": 16 if scale == "tiny" else 512 * 5_000,
            "checkpoint_every": 16 if scale == "tiny" else 256_000,
            "preview": run.preview.model_copy(update={"every": 16 if scale == "tiny" else 64_000}),
            "log_every": 8 if scale == "tiny" else 5_120,
            "out": Path("runs/finetune-immiscible"),
        }
    )


RECIPES: dict[str, Callable[[Scale], TrainRun]] = {
    "toy-moons": partial(toy, "moons"),
    "toy-ring": partial(toy, "ring"),
    "toy-spiral": partial(toy, "spiral"),
    "toy-checkerboard": partial(toy, "checkerboard"),
    "fashion-unet": fashion_unet,
    "cifar10-unet": cifar10_unet,
    "cifar10-dit": cifar10_dit,
    "cifar10-mmdit": cifar10_mmdit,
    "emoji": emoji,
    "emoji-latent": emoji_latent,
    "pets-latent": partial(photos_latent, "pets", 37),
    "birds-latent": partial(photos_latent, "birds", 200),
    "cifar10-progressive": cifar10_progressive,
    "pets-progressive": pets_progressive,
    "images": images,
    "finetune": finetune,
    "finetune-lora": finetune_lora,
    "finetune-immiscible": finetune_immiscible,
}
