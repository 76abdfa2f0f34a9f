# SPDX-License-Identifier: Apache-2.0
"""What transformers and PEFT compute for the sample model and its adapters in float32: a case folder for
`moelora verify` (expected.json, expected.safetensors) and the texts side by side."""

import json
import multiprocessing
import os

import peft
import torch
import transformers
from safetensors.torch import save_file
from torch.nn.utils import parametrize

PROMPTS = [
    "Once upon a time, a little fox", "One morning Anna found", "One evening Tom and the owl",
    "In a village in the valley lived", "There once was a young bear who", "One rainy day Lily could not find her",
    "Long ago, a brave mouse named Max", "One morning the rabbit planted a", "Early one morning Nora wanted to make",
    "One summer night a hungry wolf",
]
GREEDY = 48
ROWS = {0: 6, 1: 4, 2: 4}  # logits kept of a prompt, from its end; of the others one row


def load(model_dir, adapter_dir=None):
    model = transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32,
                                                              experts_implementation="eager")
    if adapter_dir is not None:
        model = peft.PeftModel.from_pretrained(model, adapter_dir)
    return model.eval()


@torch.no_grad()
def greedy(model, prompt, count=GREEDY):
    """Logits of the prompt, greedy tokens and the gaps between the best and the second logit at each."""
    out = model(input_ids=torch.tensor([prompt]), use_cache=True)
    prompt_logits, row, tokens, margins = out.logits[0], out.logits[0, -1], [], []
    for _ in range(count):
        best = row.topk(2)
        tokens.append(int(best.indices[0]))
        margins.append(round(float(best.values[0] - best.values[1]), 5))
        out = model(input_ids=torch.tensor([tokens[-1:]]), past_key_values=out.past_key_values, use_cache=True)
        row = out.logits[0, -1]
    return prompt_logits, tokens, margins


def answers(model_dir, adapter_dir, prompts):
    """greedy() of each prompt by the base or one adapter, logits as numpy; run in a process of its own."""
    torch.set_num_threads(1)  # so small a model is hardly faster with more
    model = load(model_dir, adapter_dir)
    with parametrize.cached():  # else PEFT adds up an expert's weight each time that it is read
        found = [greedy(model, prompt) for prompt in prompts]
    return [(logits.numpy(), tokens, margins) for logits, tokens, margins in found]


def write_references(root, names, tokenizer, num_prompts):
    """root/case from root/models/tiny-moe and root/adapters/NAME; a table of texts in root/texts.txt."""
    model_dir, case = root / "models" / "tiny-moe", root / "case"
    case.mkdir(parents=True, exist_ok=True)
    prompts = [tokenizer.encode(text, add_special_tokens=False).ids for text in PROMPTS[:num_prompts]]
    folders = [None] + [root / "adapters" / name for name in names]
    with multiprocessing.get_context("spawn").Pool(min(len(folders), max(1, os.cpu_count() // 2))) as pool:
        found = pool.starmap(answers, [(model_dir, folder, prompts) for folder in folders], chunksize=1)
    cases, logits, texts = [], {}, []
    for at, prompt in enumerate(prompts):
        rows = min(ROWS.get(at, 1), len(prompt))
        texts.append(f"== {PROMPTS[at]} ...")
        for name, of_model in zip([None, *names], found):
            prompt_logits, tokens, margins = of_model[at]
            key = f"{name or 'base'}.{at}"
            logits[key] = torch.from_numpy(prompt_logits[-rows:]).contiguous()
            text = tokenizer.decode(tokens, skip_special_tokens=False)
            cases.append({"adapter": name, "prompt": prompt, "logits": key, "first_position": len(prompt) - rows,
                          "greedy": tokens, "greedy_margin": margins, "text": text})
            texts.append(f"[{name or 'base'}]{text}")
    print("\n".join(texts), flush=True)
    cases.sort(key=lambda one: ([None, *names].index(one["adapter"]), int(one["logits"].split(".")[1])))
    save_file(logits, case / "expected.safetensors")
    header = {"transformers": transformers.__version__, "peft": peft.__version__, "questions": PROMPTS[:len(prompts)]}
    lines = ",\n".join(" " + json.dumps(one) for one in cases)
    (case / "expected.json").write_text(json.dumps(header, indent=1)[:-2] + ',\n "cases": [\n' + lines + "\n ]\n}\n")
    for link, target in (("model", "../models/tiny-moe"), ("adapters", "../adapters")):
        if not (case / link).exists():
            (case / link).symlink_to(target)
    (root / "texts.txt").write_text("\n".join(texts) + "\n")
