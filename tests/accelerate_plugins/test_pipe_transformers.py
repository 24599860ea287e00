"""Transformers models through a pipe, unmodified: masks, tied embeddings; equal to one process."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from accelerate_plugins import Accelerator, PipePlugin
from tests.ranks import run_ranks

pytest.importorskip("transformers", reason="transformers is no dependency of the tests; install it to run these")

SMALL = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}


def gpt2() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=3, n_head=4, **off))


def llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**SMALL, intermediate_size=48, num_key_value_heads=2, tie_word_embeddings=True))


def bert() -> Any:
    from transformers import BertConfig, BertForMaskedLM

    off = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return BertForMaskedLM(BertConfig(**SMALL, intermediate_size=48, max_position_embeddings=16, **off))


def gemma() -> Any:
    """Its layers have different masks in turn."""
    from transformers import Gemma2Config, Gemma2ForCausalLM

    made = {**SMALL, "num_hidden_layers": 4, "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 48}
    return Gemma2ForCausalLM(Gemma2Config(**made, sliding_window=4, query_pre_attn_scalar=8))


MODELS: dict[str, Callable[[], Any]] = {"gpt2": gpt2, "llama": llama, "bert": bert, "gemma": gemma}


def batch(number: int, n_rows: int, time: int = 10) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(number)
    ids = torch.randint(1, 64, (n_rows, time), generator=random)
    lengths = torch.randint(5, time + 1, (n_rows,), generator=random)
    mask = (torch.arange(time) < lengths[:, None]).long()
    return {"input_ids": ids * mask, "attention_mask": mask, "labels": ids.where(mask.bool(), torch.tensor(-100))}


def trained(is_piped: bool) -> dict[str, Any]:
    warnings.simplefilter("ignore")  # transformers' own
    results = {}
    for name, make in MODELS.items():
        accelerator: Any = Accelerator(plugin=PipePlugin(chunks=3) if is_piped else None, cpu=True)
        torch.manual_seed(0)
        net = make()
        model, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), 1e-3, eps=1e-4))
        losses, norms, generated = [], [], []
        for number, n_rows in enumerate((6, 6, 10, 2)):  # of 10 there are as many as positions
            outputs = model(**batch(number, n_rows))
            accelerator.backward(outputs.loss)
            norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 1.0)))
            optimizer.step()
            optimizer.zero_grad()
            losses.append(outputs.loss.item())
        model.eval()
        with torch.no_grad():
            logits = model(**batch(9, 4)).logits
            if name != "bert":
                prompt = {key: value[:, :4] for key, value in batch(9, 4).items() if key != "labels"}
                prompt["attention_mask"].fill_(1)
                greedy = {"max_new_tokens": 3, "do_sample": False, "use_cache": False, "pad_token_id": 0}
                tokens = accelerator.unwrap_model(model).generate(**prompt, **greedy)
                generated.append(tokens.tolist())
        results[name] = losses, norms, logits, dict(accelerator.get_state_dict(model)), generated
    return results


@pytest.fixture(scope="module")
def plain() -> dict[str, Any]:
    return run_ranks(1, trained, False, timeout=150)[0]  # type: ignore[no-any-return]


@pytest.mark.parametrize("n_stages", [2, 3])
def test_they_train_as_in_one_process(n_stages: int, plain: dict[str, Any]) -> None:
    for rank, results in enumerate(run_ranks(n_stages, trained, True, timeout=150)):
        for name, (losses, norms, logits, state, generated) in results.items():
            assert generated == plain[name][4], name
            assert losses == pytest.approx(plain[name][0], rel=1e-5), name
            assert norms == pytest.approx(plain[name][1], rel=1e-4), name
            torch.testing.assert_close(logits, plain[name][2], rtol=1e-4, atol=1e-5)
            if rank == 0:
                torch.testing.assert_close(state, plain[name][3], rtol=1e-5, atol=1e-5)


def with_a_cache() -> str:
    warnings.simplefilter("ignore")
    model = Accelerator(plugin=PipePlugin(), cpu=True).prepare(llama())
    with pytest.raises(TypeError, match="a pipe cannot fill a cache") as error:
        model(**batch(0, 2), use_cache=True)
    return str(error.value)


def test_a_cache_is_refused_on_every_rank() -> None:
    for said in run_ranks(2, with_a_cache):
        assert "got past_key_values of type DynamicCache" in said
