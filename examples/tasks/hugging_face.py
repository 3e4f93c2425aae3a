"""A Hugging Face model: a GPT-2 of a tiny configuration with random weights, on the standard library's bytes.

    pip install transformers
    cadenza train examples.tasks.hugging_face:build --steps 200

Nothing is downloaded. To go on from published weights, replace `AutoModelForCausalLM.from_config(…)` by
`from_pretrained(…)`, and the bytes by what its tokenizer makes of your text.
"""

import torch
from pydantic import Field

from cadenza.errors import UsageError
from cadenza.training import Config, Settings, Task
from cadenza.training.standard_library_gpt import Corpus, Windows

try:
    from transformers import AutoModelForCausalLM, GPT2Config, get_cosine_schedule_with_warmup
except ImportError as error:
    raise UsageError(
        "The task examples.tasks.hugging_face needs the transformers package: pip install transformers."
    ) from error


class Options(Settings):
    """What can be set under [options]."""

    layers: int = Field(default=2, ge=1, description="Transformer blocks.")
    width: int = Field(default=64, ge=1, description="Size of a token's vector.")
    heads: int = Field(default=4, ge=1, description="Attention heads; they divide the width.")
    context: int = Field(default=64, ge=1, description="Bytes that the model sees at once.")
    batch: int = Field(default=8, ge=1, description="Windows of that many bytes in a worker's step.")
    lr: float = Field(default=2e-3, gt=0, description="AdamW's largest learning rate.")


def build(config: Config) -> Task:
    options = config.options_as(Options)
    corpus = Corpus.standard_library()
    shape = GPT2Config(
        vocab_size=256,
        n_layer=options.layers,
        n_embd=options.width,
        n_head=options.heads,
        n_positions=options.context,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
    )
    model = AutoModelForCausalLM.from_config(shape)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)

    def batches(worker, workers):
        """Give random windows of text; the object can say where it stands, so nothing is skipped after a resume."""
        seed = 1000 * config.seed + worker
        return Windows(corpus.training, batch=options.batch, context=options.context, seed=seed)

    def loss(model, batch):
        given, _ = batch
        return model(input_ids=given, labels=given).loss  # the model itself looks one byte ahead

    def evaluate(model, worker, workers):
        starts = torch.linspace(0, len(corpus.held_out) - options.context, 64).long()[worker::workers, None]
        windows = corpus.held_out[starts + torch.arange(options.context)].long()
        windows = windows.to(next(model.parameters()).device)
        return float(model(input_ids=windows, labels=windows).loss) * len(windows), len(windows)

    return Task(
        model=model,
        optimizer=optimizer,
        batches=batches,
        loss=loss,
        evaluate=evaluate,
        scheduler=get_cosine_schedule_with_warmup(optimizer, max(1, config.steps // 10), config.steps),
        samples=lambda batch: batch[0].numel(),
        unit="tokens",
        clip_gradients=1.0,
    )
