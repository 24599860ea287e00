"""A user's script with Hugging Face's Trainer, which knows no plugin; the tests put the runner before it.

Usage: trainer_script.py FOLDER [--resume] [--use_cpu] [--max_steps N] [--fits N]
"""

import argparse
import json
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--use_cpu", action="store_true")
    parser.add_argument("--max_steps", type=int, default=6)
    parser.add_argument("--fits", type=int, default=1)
    args = parser.parse_args()
    set_seed(0)
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=64,
            n_positions=16,
            n_embd=32,
            n_layer=2,
            n_head=2,
            use_cache=False,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
        )
    )
    random = torch.Generator().manual_seed(1)
    rows = torch.randint(64, (64, 16), generator=random)
    data = [{"input_ids": row, "labels": row} for row in rows]
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=str(args.folder),
            max_steps=args.max_steps,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            learning_rate=1e-2,
            adam_epsilon=1e-3,  # or rounding decides where a gradient is zero but for it (the keys' biases)
            max_grad_norm=1.0,
            logging_steps=1,
            save_steps=3,
            eval_steps=3,
            eval_strategy="steps",
            load_best_model_at_end=True,
            report_to=[],
            use_cpu=args.use_cpu,
            disable_tqdm=True,
        ),
        train_dataset=data,
        eval_dataset=data[:8],
    )
    for _ in range(args.fits - 1):
        trainer.train()
    trainer.train(resume_from_checkpoint=str(args.folder / "checkpoint-3") if args.resume else None)
    trainer.save_model(str(args.folder / "final"))
    if trainer.is_world_process_zero():
        said = {
            "log": trainer.state.log_history,
            "num_processes": trainer.accelerator.num_processes,
            "class": type(getattr(trainer.accelerator, "plugin", None)).__name__,
        }
        (args.folder / "said.json").write_text(json.dumps(said))


if __name__ == "__main__":
    main()
