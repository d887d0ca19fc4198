"""Text encoders give transformers' own states, once per prompt, from files that hold no code."""

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from metrics.parity import minilm_folder
from metrics.shared import SHARED, planted

from stillhouse.errors import UserError
from stillhouse.metrics.text import SentenceEncoder
from stillhouse.models.text import EmbeddedCaptions, TextEncoder

PROMPTS = ["a cat", "", "dogs", "nine lives", "a cat"]
LETTERS = "abcdefghijklmnopqrstuvwxyz"
SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}


def write_clips(root: Path) -> None:
    """CLIP whole, its text half, and its text half with the projection."""
    import transformers as t

    words = ["<|startoftext|>", "<|endoftext|>", *LETTERS, *(f"{letter}</w>" for letter in LETTERS)]
    tokenizer = t.CLIPTokenizer({word: number for number, word in enumerate(words)}, [])
    ends = {"bos_token_id": 0, "eos_token_id": 1, "projection_dim": 16}
    text = t.CLIPTextConfig(vocab_size=len(words), max_position_embeddings=12, **ends, **SMALL)
    vision = t.CLIPVisionConfig(image_size=16, patch_size=8, **SMALL)
    whole = t.CLIPConfig(
        text_config=text.to_dict(), vision_config=vision.to_dict(), projection_dim=16
    )
    for name, model in {
        "clip": t.CLIPModel(whole),
        "clip-text": t.CLIPTextModel(text),
        "clip-projected": t.CLIPTextModelWithProjection(text),
    }.items():
        model.save_pretrained(root / name)
        tokenizer.save_pretrained(root / name)


def write_t5s(root: Path) -> None:
    """The encoder alone, and with the decoder, as the hub has it."""
    import transformers as t

    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", -9.0), ("▁", -2.0)]
    tokenizer = t.T5Tokenizer([*pieces, *((letter, -3.0) for letter in LETTERS)], extra_ids=0)
    config = t.T5Config(vocab_size=40, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4)
    for name, model in {
        "t5": t.T5EncoderModel(config),
        "t5-whole": t.T5ForConditionalGeneration(config),
    }.items():
        model.save_pretrained(root / name)
        tokenizer.save_pretrained(root / name)


def write_bert(root: Path) -> None:
    import transformers as t

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *LETTERS, *(f"##{c}" for c in LETTERS)]
    tokenizer = t.BertTokenizer({word: number for number, word in enumerate(words)})
    config = t.BertConfig(
        vocab_size=len(words), intermediate_size=64, max_position_embeddings=24, **SMALL
    )
    t.BertModel(config).save_pretrained(root / "bert")
    tokenizer.save_pretrained(root / "bert")


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("encoders")
    torch.manual_seed(0)
    write_clips(folder)
    write_t5s(folder)
    write_bert(folder)
    return folder


@pytest.fixture(scope="module")
def minilm() -> str:
    return minilm_folder()


EVERY = pytest.mark.parametrize(
    ("name", "model"),
    [
        ("clip", "CLIPTextModel"),
        ("clip-text", "CLIPTextModel"),
        ("clip-projected", "CLIPTextModelWithProjection"),
        ("t5", "T5EncoderModel"),
        ("t5-whole", "T5EncoderModel"),
        ("bert", "BertModel"),
    ],
)


def alone(folder: Path, model: str, prompt: str):
    """What transformers gives for one prompt by itself, without any padding."""
    import transformers as t

    network = getattr(t, model).from_pretrained(folder).eval()
    tokens = t.AutoTokenizer.from_pretrained(folder)(prompt, return_tensors="pt")
    with torch.no_grad():
        return network(input_ids=tokens.input_ids)


@EVERY
def test_tokens_are_transformers_states_of_the_prompt_alone(root, name, model):
    found = TextEncoder(str(root / name), length=12).encode(PROMPTS)
    assert found.text.shape == (5, 12, 32)
    assert found.text.dtype == torch.float32
    for row, prompt in enumerate(PROMPTS):
        wanted = alone(root / name, model, prompt).last_hidden_state[0]
        count = int(found.text_mask[row].sum())
        assert count == len(wanted)
        assert bool(found.text_mask[row, :count].all())
        torch.testing.assert_close(found.text[row, :count], wanted)
    assert (found.text[~found.text_mask] == 0).all()
    assert (found.text[0] - found.text[2]).abs().max() > 0.01


def test_pooled_is_the_vector_that_each_kind_is_known_for(root):
    from transformers import CLIPModel, CLIPTokenizer

    prompts = ["a cat", "dogs"]
    tokens = CLIPTokenizer.from_pretrained(root / "clip")(
        prompts, padding=True, return_tensors="pt"
    )
    with torch.no_grad():
        features = CLIPModel.from_pretrained(root / "clip").eval().get_text_features(**tokens)
    wanted = {
        "clip": features.pooler_output,
        "clip-text": [alone(root / "clip-text", "CLIPTextModel", p).pooler_output for p in prompts],
        "clip-projected": [
            alone(root / "clip-projected", "CLIPTextModelWithProjection", p).text_embeds
            for p in prompts
        ],
        "t5": [alone(root / "t5", "T5EncoderModel", p).last_hidden_state.mean(1) for p in prompts],
        "bert": SentenceEncoder(str(root / "bert"))(prompts),
    }
    for name, vectors in wanted.items():
        found = TextEncoder(str(root / name)).encode(prompts).pooled
        vectors = torch.cat(vectors) if isinstance(vectors, list) else vectors
        torch.testing.assert_close(found, vectors)


def test_the_encoder_is_frozen_and_does_not_see_the_loop_around_it(root):
    encoder = TextEncoder(str(root / "t5"))
    plain = encoder.encode(PROMPTS)
    assert not encoder.model.training
    assert not any(weight.requires_grad for weight in encoder.model.parameters())
    with torch.enable_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        inside = encoder.encode(PROMPTS)
    assert not inside.text.requires_grad
    assert torch.equal(inside.text, plain.text)
    assert torch.equal(inside.pooled, plain.pooled)


def test_equal_prompts_are_encoded_once_and_batches_do_not_matter(root):
    encoder = TextEncoder(str(root / "bert"), length=12)
    seen = []
    encoder.model.register_forward_hook(
        lambda module, args, kwargs, out: seen.append(len(kwargs["input_ids"])), with_kwargs=True
    )
    many = encoder.encode(PROMPTS * 40)
    assert seen == [4]
    assert torch.equal(many.text[0], many.text[4])
    distinct = [f"{a}{b}" for a in LETTERS for b in LETTERS[:3]]
    found = encoder.encode(distinct)
    assert seen == [4, 64, 14]
    for row in (0, 63, 64, 77):
        torch.testing.assert_close(found.text[row], encoder.encode([distinct[row]]).text[0])


def test_the_empty_prompt_is_the_null_condition(root):
    for name, tokens in {"clip": 2, "t5": 1, "bert": 2}.items():
        encoder = TextEncoder(str(root / name), length=12)
        null, batch = encoder.null, encoder.encode(["a cat", "dogs"])
        assert int(null.text_mask.sum()) == tokens
        assert all(torch.isfinite(value).all() for value in (null.text, null.pooled))
        dropped = batch.drop(torch.tensor([False, True]), null)
        assert torch.equal(dropped.text[0], batch.text[0])
        assert torch.equal(dropped.text[1], null.text[0])
        assert torch.equal(dropped.text_mask[1], null.text_mask[0])
        assert torch.equal(dropped.pooled[1], null.pooled[0])


def test_long_prompts_are_cut_and_keep_their_end(root):
    encoder = TextEncoder(str(root / "clip"), length=5)
    long, cut = "abc defg", "abc"  # one token a letter, a start and an end
    assert encoder.count_tokens([long, cut, ""]) == [9, 5, 2]
    found = encoder.encode([long, cut])
    assert found.text_mask.all()
    torch.testing.assert_close(found.text[0], found.text[1])
    torch.testing.assert_close(found.pooled[0], found.pooled[1])


def test_lengths_that_no_prompt_can_have_are_refused(root):
    assert TextEncoder(str(root / "clip")).length == 12  # of 77, as many as it has positions for
    assert TextEncoder(str(root / "t5")).length == 120
    with pytest.raises(UserError, match="takes prompts of 3 to 12 tokens, not 13"):
        TextEncoder(str(root / "clip"), length=13)
    with pytest.raises(UserError, match="takes prompts of 2 or more tokens, not 1"):
        TextEncoder(str(root / "t5"), length=1)
    assert TextEncoder(str(root / "t5"), length=2).encode(["a cat"]).text.shape == (1, 2, 32)


def test_one_text_is_no_list_of_letters(root):
    encoder = TextEncoder(str(root / "bert"))
    with pytest.raises(TypeError, match="list of one"):
        encoder.encode("cat")
    with pytest.raises(ValueError, match="no prompts"):
        encoder.encode([])


# ---------------------------------------------------------------- files


def copied(folder: Path, into: Path, *, without=()) -> Path:
    into.mkdir()
    for path in folder.iterdir():
        if path.name not in without:
            (into / path.name).write_bytes(path.read_bytes())
    return into


def changed(path: Path, **values) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_the_digest_tells_apart_all_that_embeddings_depend_on(root, tmp_path):
    digest = TextEncoder(str(root / "bert"), length=12).digest
    same = copied(root / "bert", tmp_path / "same")
    assert TextEncoder(str(same), length=12).digest == digest
    others = {TextEncoder(str(root / "bert"), length=13).digest}
    for file in ("config.json", "tokenizer_config.json"):
        folder = copied(root / "bert", tmp_path / file)
        changed(folder / file, note="changed")
        others.add(TextEncoder(str(folder), length=12).digest)
    weights = copied(root / "bert", tmp_path / "weights")
    content = bytearray((weights / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (weights / "model.safetensors").write_bytes(content)
    others.add(TextEncoder(str(weights), length=12).digest)
    assert len(others) == 4
    assert digest not in others


def test_a_tokenizer_may_have_its_own_folder(root, tmp_path):
    """As in diffusers' pipelines: text_encoder/ beside tokenizer/."""
    names = ("tokenizer.json", "tokenizer_config.json")
    model = copied(root / "clip-text", tmp_path / "words", without=names)
    files = copied(root / "clip-text", tmp_path / "tokenizer_2", without=("model.safetensors",))
    (files / "config.json").unlink()
    with pytest.raises(UserError, match=r"no tokenizer\.json.*the tokenizer's own folder"):
        TextEncoder(str(model))
    wanted = TextEncoder(str(root / "clip-text")).encode(PROMPTS).text
    found = TextEncoder(str(model), tokenizer=str(files)).encode(PROMPTS)
    assert torch.equal(found.text, wanted)
    model = model.rename(tmp_path / "text_encoder_2")
    assert torch.equal(TextEncoder(str(model)).encode(PROMPTS).text, wanted)
    (files / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match=r"tokenizer .* cannot be read"):
        TextEncoder(str(model), tokenizer=str(files))


def test_code_beside_an_encoder_is_not_run(root, tmp_path):
    folder = copied(root / "bert", tmp_path / "code")
    (folder / "code.py").write_text(f"import os; os.mkdir({str(tmp_path / 'mark')!r})")
    classes = {"AutoModel": "code.Model", "AutoConfig": "code.Config"}
    changed(folder / "config.json", auto_map=classes)
    tokenizer = {"AutoTokenizer": ["code.Tokenizer", None]}
    changed(folder / "tokenizer_config.json", auto_map=tokenizer)
    plain = TextEncoder(str(root / "bert")).encode(PROMPTS)
    assert torch.equal(TextEncoder(str(folder)).encode(PROMPTS).text, plain.text)
    assert not (tmp_path / "mark").exists()


def test_encoders_that_are_none_are_refused(root, tmp_path):
    with pytest.raises(UserError, match="neither a folder with a text encoder"):
        TextEncoder(str(tmp_path / "nowhere"))
    strange = copied(root / "bert", tmp_path / "strange")
    changed(strange / "config.json", model_type="vit")
    with pytest.raises(UserError, match="type vit; text encoders are clip, clip_text_model, t5"):
        TextEncoder(str(strange))
    deeper = copied(root / "t5", tmp_path / "deeper")
    changed(deeper / "config.json", num_layers=3)
    with pytest.raises(UserError, match=r"\d+ tensors missing"):
        TextEncoder(str(deeper))
    pickled = copied(root / "bert", tmp_path / "pickled", without=("model.safetensors",))
    (pickled / "pytorch_model.bin").write_bytes(planted(tmp_path / "mark"))
    with pytest.raises(UserError, match=r"no model\.safetensors"):
        TextEncoder(str(pickled))
    assert not (tmp_path / "mark").exists()


def test_a_hub_id_is_found_in_the_hubs_cache(root, tmp_path, monkeypatch):
    from huggingface_hub import constants

    cache = tmp_path / "models--tiny--bert"
    (cache / "refs").mkdir(parents=True)
    (cache / "refs" / "main").write_text("0" * 40)
    (cache / "snapshots").mkdir()
    copied(root / "bert", cache / "snapshots" / ("0" * 40))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    found = TextEncoder("tiny/bert")
    assert found.digest == TextEncoder(str(root / "bert")).digest
    with pytest.raises(UserError, match="tiny/other is neither"):
        TextEncoder("tiny/other")


# ---------------------------------------------------------------- captions


@pytest.mark.parametrize("name", ["clip", "t5", "bert"])
def test_captions_are_looked_up_as_the_encoder_gives_them(root, name):
    encoder = TextEncoder(str(root / name), length=12)
    captions = [f"{a} {b}{a}" for a in LETTERS for b in LETTERS[:3]]
    table = EmbeddedCaptions.of(encoder, captions * 2)
    assert table.captions == (*captions, "")
    places = torch.tensor([77, 0, 64, 78, 0])
    found, wanted = table[places], encoder.encode([*captions, ""])[places]
    assert torch.equal(found.text, wanted.text)
    assert torch.equal(found.text_mask, wanted.text_mask)
    assert torch.equal(found.pooled, wanted.pooled)
    assert torch.equal(table.places([captions[77], captions[0]]), places[:2])
    assert torch.equal(table.null.text, table[torch.tensor([78])].text)
    torch.testing.assert_close(table.null.text, encoder.null.text)
    assert len(table.tokens) == sum(encoder.count_tokens(table.captions))


def test_a_caption_that_was_not_encoded_is_named(root):
    table = EmbeddedCaptions.of(TextEncoder(str(root / "bert"), length=12), ["", "cat", "dog"])
    assert table.captions == ("", "cat", "dog")
    assert torch.equal(table.null.text, table[torch.tensor([0])].text)
    with pytest.raises(ValueError, match="'cow' is none of the 3 captions"):
        table.places(["cat", "cow"])
    assert torch.equal(table[torch.tensor([-1])].text, table[torch.tensor([2])].text)
    with pytest.raises(IndexError):
        table[torch.tensor([3])]
    moved = table.to("meta")
    assert {moved.tokens.device.type, moved.starts.device.type, moved.pooled.device.type} == {
        "meta"
    }


def test_minilm_is_the_sentence_encoder_of_the_metrics(minilm):
    prompts = ["a red apple", "an apple, red", "traffic jam", ""]
    encoder = TextEncoder(minilm, length=16)
    found = encoder.encode(prompts)
    assert found.text.shape == (4, 16, 384)
    assert encoder.width == 384
    torch.testing.assert_close(found.pooled, SentenceEncoder(minilm)(prompts))
    assert found.pooled[0] @ found.pooled[1] > 0.8 > 0.4 > found.pooled[0] @ found.pooled[2]


@pytest.mark.slow
def test_every_emoji_caption_fits_sixteen_tokens_and_is_encoded_once(minilm):
    data = SHARED / "data" / "emoji"
    if not data.is_dir():
        pytest.skip(f"{data} is not on this machine")
    captions = pq.read_table(data, columns=["caption"])["caption"].to_pylist()
    encoder = TextEncoder(minilm, length=16)
    table = EmbeddedCaptions.of(encoder, captions)
    assert len(table) == 1907  # 1,906 and the empty one
    assert len(table.tokens) == sum(encoder.count_tokens(table.captions))  # nothing was cut
    some = captions[::500]
    wanted = encoder.encode(some)
    found = table[table.places(some)]
    torch.testing.assert_close(found.text, wanted.text, rtol=1e-4, atol=1e-5)
    assert torch.equal(found.text_mask, wanted.text_mask)
