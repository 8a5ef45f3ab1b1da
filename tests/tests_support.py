"""Things that several tests make: tasks on the database `people`, a tokenizer with a chat template."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from savepoint.envs.sql.tasks import Task

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def chatml_tokenizer(chat_template: str | None = CHATML) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer without merges, with ChatML's markers and, unless None is given, a template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    markers = ["<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(special_tokens=markers, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False)
    tokenizer.train_from_iterator([], trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>")
    fast.chat_template = chat_template
    return fast


def debugging(**changes: object) -> Task:
    """A debugging task on `people`: a misspelled column."""
    fields = {
        "instance_id": "p1", "task": "debugging", "db_id": "people", "query": "list city of people where age is over 40",
        "issue_sql": ["SELECT cty FROM people WHERE age > 40"], "sol_sql": ["SELECT city FROM people WHERE age > 40"], "category": "misspelled_column",
    }  # fmt: skip
    return Task(**{**fields, **changes})  # type: ignore[arg-type]


def renamed(**changes: object) -> Task:
    """A debugging task on `people` whose city is called town since the query was written."""
    fields = {
        "instance_id": "p2", "preprocess_sql": ["ALTER TABLE people RENAME COLUMN city TO town"], "issue_sql": ["SELECT city FROM people WHERE age > 40"],
        "sol_sql": ["SELECT town FROM people WHERE age > 40"], "category": "renamed_column",
        "synth": {"kind": "renamed_column", "table": "people", "old": "city", "new": "town", "candidates": ["town", "place", "site", "spot"],
                  "guesses": [f"SELECT {name} FROM people WHERE age > 40" for name in ("town", "place", "site", "spot")]},
    }  # fmt: skip
    return debugging(**{**fields, **changes})
