"""What somebody does who has diffusers and a student's folder: a process without Stillhouse.

    python plain_diffusers.py JOBS.json

Each job opens a pipeline, draws with each number of steps, and leaves the state that the scheduler
reached and the images that were made of it.
"""

import json
import sys
from pathlib import Path
from typing import Any

import diffusers
import torch
from safetensors.torch import load_file, save_file


def opened(job: dict[str, Any]) -> Any:
    pipe: Any = diffusers.DiffusionPipeline.from_pretrained(job["folder"], use_safetensors=True)
    if job.get("lora"):
        config = json.loads(Path(job["lora"], "scheduler/scheduler_config.json").read_text())
        scheduler = getattr(diffusers, config["_class_name"])
        pipe.scheduler = scheduler.from_pretrained(job["lora"], subfolder="scheduler")
        pipe.load_lora_weights(job["lora"])
    pipe.set_progress_bar_config(disable=True)
    return pipe


def watch(scheduler: Any) -> list[torch.Tensor]:
    """The state after every step."""
    reached: list[torch.Tensor] = []
    step = scheduler.step

    def watched(*args: Any, **options: Any) -> Any:
        found = step(*args, **options)
        reached.append(found[0])
        return found

    scheduler.step = watched
    return reached


def draw(job: dict[str, Any]) -> None:
    pipe, found = opened(job), {}
    reached = watch(pipe.scheduler)
    for steps in job["steps"]:
        start: dict[str, Any] = {}
        if job.get("seed") is not None:  # pipelines that draw their noise themselves
            start["generator"] = torch.Generator().manual_seed(job["seed"])
        else:
            pipe.scheduler.set_timesteps(steps)
            unit = getattr(pipe.scheduler, "init_noise_sigma", 1.0)
            start["latents"] = load_file(job["given"])["state"] / unit
        reached.clear()
        options = {"num_inference_steps": steps, "output_type": "np"}
        images = pipe(**job["call"], **start, **options).images
        assert len(reached) == steps
        found[f"state{steps}"] = reached[-1].contiguous()
        found[f"images{steps}"] = torch.as_tensor(images).contiguous()
    save_file(found, job["found"])


if __name__ == "__main__":
    for job in json.loads(Path(sys.argv[1]).read_text()):
        draw(job)
    assert "stillhouse" not in sys.modules
