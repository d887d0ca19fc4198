"""A pipeline is sampled with prompts that its own text encoders encode."""

import pytest
import torch
from PIL import Image
from tunable import FAMILIES, SIDE

from stillhouse.errors import UserError
from stillhouse.pipelines.prompts import PromptEncoder
from stillhouse.recipes.parts import ClassifierFree
from stillhouse.recipes.sampling import SampleRun
from stillhouse.recipes.sampling import run as sample
from stillhouse.recipes.subjects import Wish, load_subject


@pytest.mark.parametrize("family", FAMILIES)
def test_a_pipeline_is_sampled_with_prompts_of_its_own_encoders(models, tmp_path, family):
    prompts = ("a red cat", "blue")
    guided = ClassifierFree()
    wish = Wish(guided, (), None, torch.float32, torch.device("cpu"), prompts)
    subject = load_subject(str(models[family]), wish)
    found = subject.condition([0, 1, 2], torch.device("cpu"))
    wanted = PromptEncoder(models[family]).encode(prompts)[[0, 1, 0]]
    masked = wanted.text * wanted.text_mask[..., None]
    torch.testing.assert_close(found.text, masked, rtol=0, atol=1e-5)
    assert subject.prompts_of([0, 1, 2]) == ["a red cat", "blue", "a red cat"]
    config = SampleRun(
        model=str(models[family]),
        prompt=prompts,
        guidance=guided,
        count=2,
        steps=2,
        out=tmp_path / "drawn",
    )
    sample(config)
    assert Image.open(tmp_path / "drawn/images/000001.png").size == (SIDE, SIDE)


def test_a_pipeline_without_a_prompt_is_not_sampled(models, tmp_path):
    with pytest.raises(UserError, match="draws what it is told"):
        sample(SampleRun(model=str(models["sd15"]), out=tmp_path / "drawn"))
