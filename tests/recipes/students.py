"""Small teachers and short distillations of them, for all tests of `stillhouse distill`."""

import json
from pathlib import Path

import torch
from datasets import Dataset
from small_models import save_scheduler, small_unet

from stillhouse.engine.optimisers import AdamW
from stillhouse.engine.world import World
from stillhouse.recipes.distill.methods import Sfd
from stillhouse.recipes.distill.settings import Comparison, DistillRun, StudentPreview

EDM = {"_class_name": "EDMEulerScheduler", "sigma_data": 0.5}
FLOW = {"_class_name": "FlowMatchEulerDiscreteScheduler"}
VP = {"_class_name": "DDIMScheduler", "clip_sample": True}
CLASSES = {"num_class_embeds": 8}
HERE = World(0, 1, torch.device("cpu"))
WEIGHTS = "diffusion_pytorch_model.safetensors"


def distilling(model: Path, out: Path, **changes) -> DistillRun:
    """Two batches of a small student."""
    settings = {
        "method": Sfd(refinement=2),
        "evaluations": "2",
        "images": 8,
        "batch": 4,
        "optim": AdamW(lr=1e-3),
        "log_every": 4,
        "checkpoint_every": 4,
        "preview": StudentPreview(every=8, count=2, steps=3),
        "comparison": Comparison(count=0),
        "device": "cpu",
    }
    return DistillRun(model=str(model), out=out, **{**settings, **changes})


def bare(folder: Path, scheduler: dict, **network) -> Path:
    small_unet(**network).save_pretrained(folder)
    save_scheduler(folder, scheduler)
    return folder


def log_of(out: Path) -> list[dict]:
    return [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]


def losses(out: Path) -> list[float]:
    return [line["student/loss"] for line in log_of(out) if "student/loss" in line]


def column_of(file, **columns):
    Dataset.from_dict(columns).to_parquet(file)
    return str(file)
