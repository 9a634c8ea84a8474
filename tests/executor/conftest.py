"""Networks that transformers runs as the oracle, and the checkpoints of them."""

import pytest
import torch

from tests.checkpoints import build_random_model, save_checkpoint, tiny_config


class Oracle:
    """A checkpoint and the transformers model that it was saved from."""

    def __init__(self, folder, model_type, **changes):
        self.model = build_random_model(tiny_config(model_type, **changes))
        self.folder = save_checkpoint(folder, self.model)
        self._generated: dict[tuple[int, ...], list[int]] = {}

    def compute_logits(self, token_ids):
        with torch.inference_mode():
            return self.model(torch.tensor([token_ids])).logits[0]

    def generate(self, prompt, num_tokens):
        """Greedy continuation that no EOS ends."""
        key = tuple(prompt)
        if len(self._generated.get(key, [])) < num_tokens:
            self._generated[key] = self._generate(prompt, num_tokens)
        return self._generated[key][:num_tokens]

    def _generate(self, prompt, num_tokens):
        with torch.inference_mode():
            ids = self.model.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                do_sample=False,
                max_new_tokens=num_tokens,
                eos_token_id=None,
                pad_token_id=0,
            )
        return ids[0, len(prompt) :].tolist()


@pytest.fixture(scope="session")
def llama(checkpoints):
    return Oracle(checkpoints / "oracle-llama", "llama")


@pytest.fixture(scope="session")
def qwen3(checkpoints):
    return Oracle(checkpoints / "oracle-qwen3", "qwen3")


@pytest.fixture(scope="session", params=["llama", "qwen3"])
def oracle(request):
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="session")
def small_llama(checkpoints):
    """One layer of two heads: Triton's interpreter takes milliseconds for each of a token."""
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2}
    return Oracle(checkpoints / "oracle-small-llama", "llama", num_hidden_layers=1, **heads)
