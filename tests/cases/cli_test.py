#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What the moelora command promises: formats, order, exit codes and messages. cli_test.py MOELORA CASES_DIR TMP_DIR"""

import json
import os
import re
import shutil
import stat
import subprocess
import sys
import tempfile
import time

MOELORA, CASES, TMP = sys.argv[1:4]
CASE = CASES + "/qwen3_moe"
MODEL = CASE + "/model"
with open(CASE + "/expected.json", encoding="utf-8") as file:
    REFERENCE = {(case["adapter"] or "base", len(case["prompt"])): case for case in json.load(file)["cases"]}
failures = []


# A folder of this test's own, with a short name, for what `moelora top` looks at.
RUNTIME = tempfile.mkdtemp(prefix="moelora-")
ENVIRONMENT = {**os.environ, "XDG_RUNTIME_DIR": RUNTIME}
MAKE_ADAPTERS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "../../tools/make_adapters.py")


def moelora(*arguments, stdin=""):
    return subprocess.run([MOELORA, *arguments], input=stdin, capture_output=True, text=True, timeout=300,
                          env=ENVIRONMENT)


def check(condition, what, result=None):
    if not condition:
        failures.append(what)
        print("FAILED", what)
        if result is not None:
            print(f"  exit {result.returncode}\n  stdout {result.stdout[-2000:]}\n  stderr {result.stderr[-2000:]}")


def adapter(name):
    return ("--adapter", f"{name}={CASE}/adapters/{name}")


def request(identity, name, length, **fields):
    case = REFERENCE[(name, length)]
    line = {"id": identity, "tokens": case["prompt"], "max_tokens": len(case["greedy"]), "ignore_eos": True, **fields}
    if name != "base":
        line["adapter"] = name
    return json.dumps(line)


def test_version_and_usage():
    result = moelora("--version")
    check(result.returncode == 0 and result.stdout.startswith("moelora 0."), "--version", result)
    for arguments in ([], ["generate"], ["bench", "--model", MODEL, "--targets", "nothing"], ["verify", "/nowhere"]):
        result = moelora(*arguments)
        check(result.returncode == 2, f"wrong usage exits 2: {arguments}", result)


def test_tokenize():
    folder = CASES + "/../tokenizers/mixtral"
    text = "caf\u00e9 <|user|>\0 x\n"
    result = moelora("tokenize", "--model", folder, "--json", stdin=text)
    check(result.returncode == 0 and list(json.loads(result.stdout)) == ["ids"], "tokenize --json", result)
    ids = json.loads(result.stdout)["ids"]
    plain = moelora("tokenize", "--model", folder, "--no-special", stdin=text)
    check(plain.stdout == " ".join(map(str, ids[1:])) + "\n", "tokenize --no-special leaves out BOS", plain)
    back = moelora("detokenize", "--model", folder, stdin=plain.stdout)
    # The mark that the normaliser puts before a segment is a space behind a special token.
    check(back.returncode == 0 and back.stdout == text.replace("<|user|>", "<|user|> "), "detokenize", back)
    back = moelora("detokenize", "--model", folder, "--json", "--skip-special", stdin="[1, 369, 320]")
    check(json.loads(back.stdout) == {"text": "a"}, "detokenize --json --skip-special", back)
    result = moelora("tokenize", "--model", MODEL, stdin="a")
    check(result.returncode == 1 and "tokenizer.json" in result.stderr, "tokenize names the missing file", result)
    result = moelora("detokenize", "--model", folder, stdin="1 x")
    check(result.returncode == 1 and "'x'" in result.stderr, "detokenize names a bad token", result)


def test_generate():
    case = REFERENCE[("attn", 7)]
    result = moelora("generate", "--model", MODEL, *adapter("attn"), *adapter("experts"), "--base", "--json",
                     "--tokens", ",".join(map(str, case["prompt"])), "--max-tokens", "12", "--ignore-eos")
    check(result.returncode == 0, "generate", result)
    answers = {line["adapter"]: line["tokens"] for line in map(json.loads, result.stdout.splitlines())}
    for name in ("base", "attn", "experts"):
        check(answers.get(name) == REFERENCE[(name, 7)]["greedy"], f"generate: tokens of {name}", result)
    result = moelora("generate", "--model", MODEL, "--tokens", "1 2 x")
    check(result.returncode == 1 and "'x'" in result.stderr, "generate names a bad token", result)
    result = moelora("generate", "--model", MODEL, "--tokens", "1", "--set", "devise=cpu")
    check(result.returncode == 1 and "devise" in result.stderr and "device" in result.stderr,
          "an unknown option names near matches", result)


def text_model():
    """The model with a tokenizer beside it: ids 0 to 255 are bytes, 256 is the BOS, others are words."""
    folder = os.path.join(TMP, "text_model")
    shutil.rmtree(folder, ignore_errors=True)
    os.makedirs(folder)
    for name in os.listdir(MODEL):
        os.symlink(os.path.join(MODEL, name), os.path.join(folder, name))
    others = 0
    vocab = {}
    for byte in range(256):
        plain = 0x21 <= byte <= 0x7E or 0xA1 <= byte <= 0xAC or byte >= 0xAE
        vocab[chr(byte if plain else 256 + others)] = byte
        others += not plain
    vocab.update({f"word{i}": i for i in range(257, 320)})
    tokenizer = {
        "added_tokens": [{"id": 256, "content": "<s>", "special": True}], "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True},
        "post_processor": {"type": "TemplateProcessing",
                           "single": [{"SpecialToken": {"id": "<s>"}}, {"Sequence": {"id": "A"}}],
                           "special_tokens": {"<s>": {"id": "<s>", "ids": [256]}}},
        "decoder": {"type": "ByteLevel"}, "model": {"type": "BPE", "vocab": vocab, "merges": []}}
    with open(os.path.join(folder, "tokenizer.json"), "w", encoding="utf-8") as file:
        json.dump(tokenizer, file)
    return folder


def lines_of(text):
    """As subprocess gives it."""
    return text.replace("\r\n", "\n").replace("\r", "\n")


def test_text():
    model = text_model()
    flags = ("--model", model, "--max-tokens", "12", "--ignore-eos")
    by_id = json.loads(moelora("generate", *flags, "--json", "--tokens", "256 104 105").stdout)
    by_text = moelora("generate", *flags, "--json", "--text", "hi")
    check(by_text.returncode == 0 and json.loads(by_text.stdout)["tokens"] == by_id["tokens"],
          "generate --text has a BOS", by_text)
    text = json.loads(by_text.stdout)["text"]
    check(by_id["text"] == text, "generate --tokens --json has text too", by_text)
    streamed = moelora("generate", *flags, "--text", "hi")
    check(streamed.stdout == lines_of(text + "\n"), "generate --text streams text", streamed)
    streamed = moelora("generate", *flags, "--tokens", "256 104 105")
    check(streamed.stdout.split() == list(map(str, by_id["tokens"])), "generate --tokens streams ids", streamed)
    several = moelora("generate", *flags, "--text", "hi", "--base", *adapter("attn"))
    check(lines_of(f"base:\n{text}\n") in several.stdout and "attn:\n" in several.stdout,
          "generate: several texts", several)
    stop = text[len(text) // 2]
    wanted = text[:text.index(stop)]
    stopped = moelora("generate", *flags, "--text", "hi", "--stop", "no such text", "--stop", stop)
    check(stopped.stdout == lines_of(wanted + "\n") and "ended by stop" in stopped.stderr, "generate --stop", stopped)
    common = {"max_tokens": 12, "ignore_eos": True}
    lines = [{"id": 1, "prompt": "hi", **common}, {"id": 2, "text": "hi", "stop": stop, **common},
             {"id": 3, "tokens": [256, 104, 105], "stop": ["no such text", stop], **common},
             {"id": 4, "text": "hi", "prompt": "hi"}, {"id": 5, "prompt": ["hi"]},
             {"id": 6, "text": "hi", "stop": ""}]
    result = moelora("run", "--model", model, stdin="\n".join(map(json.dumps, lines)) + "\n")
    answers = [json.loads(line) for line in result.stdout.splitlines()]
    check(answers[0].get("text") == text and answers[0].get("tokens") == by_id["tokens"], "run: prompt", result)
    for answer in answers[1:3]:
        check(answer.get("text") == wanted and answer.get("finish_reason") == "stop", "run: stop", result)
    check(all("E_INVALID" == answer.get("error", {}).get("status") for answer in answers[3:]), "run: errors", result)
    result = moelora("generate", "--model", MODEL, "--text", "hi")
    check(result.returncode == 1 and "no tokenizer" in result.stderr, "text without a tokenizer", result)
    result = moelora("generate", "--model", model, "--text", "hi", "--tokens", "1")
    check(result.returncode == 1 and "one of --text" in result.stderr, "one prompt only", result)


def test_run_keeps_order_and_reports_errors():
    lines = [request("long", "base", 100), request(7, "attn", 1), request("c", "experts", 33), "{not json",
             request("typo", "base", 1, temprature=1.0), request("who", "base", 1, adapter="nobody"),
             json.dumps({"id": "empty", "tokens": []}), json.dumps({"id": "vocab", "tokens": [10**6]}),
             "", json.dumps({"id": "nothing"})]
    result = moelora("run", "--model", MODEL, *adapter("attn"), *adapter("experts"), stdin="\n".join(lines) + "\n")
    check(result.returncode == 1, "run exits 1 when requests failed", result)
    answers = [json.loads(line) for line in result.stdout.splitlines()]
    check([answer["id"] for answer in answers] == ["long", 7, "c", 4, "typo", "who", "empty", "vocab", "nothing"],
          "run keeps the order of its input", result)
    for index, key in ((0, ("base", 100)), (1, ("attn", 1)), (2, ("experts", 33))):
        check(answers[index].get("tokens") == REFERENCE[key]["greedy"], f"run: tokens of {key}", result)
        check(answers[index].get("finish_reason") == "length", f"run: finish reason of {key}", result)
        check(answers[index].get("usage", {}).get("prompt_tokens") == key[1], f"run: usage of {key}", result)
    for answer, word in ((answers[4], "temprature"), (answers[5], "nobody"), (answers[7], "1000000")):
        check(word in answer.get("error", {}).get("message", ""), f"run: the error names {word}", result)
    check(all(answer.get("error", {}).get("status", "").startswith("E_") for answer in answers[3:]),
          "run: errors carry a status", result)
    check("9 requests, 6 failed" in result.stderr, "run: summary", result)


def test_run_files_and_as_completed():
    source, target = os.path.join(TMP, "requests.jsonl"), os.path.join(TMP, "answers.jsonl")
    with open(source, "w", encoding="utf-8") as file:
        file.write(request("long", "base", 100) + "\n" + request("short", "base", 1, max_tokens=1) + "\n")
    result = moelora("run", "--model", MODEL, "--input", source, "--output", target, "--as-completed")
    with open(target, encoding="utf-8") as file:
        answers = [json.loads(line) for line in file]
    identities = {answer["id"] for answer in answers}
    check(result.returncode == 0 and identities == {"long", "short"}, "run with files", result)
    result = moelora("run", "--model", MODEL, "--input", "/nowhere.jsonl")
    check(result.returncode == 1 and "/nowhere.jsonl" in result.stderr, "run names a missing file", result)


def test_verify_fails_where_it_must():
    result = moelora("verify", CASE, "--only", "dora")
    check(result.returncode == 1 and "dora" in result.stdout.lower(), "verify: a refused adapter is a failure", result)
    # Against another model's reference every case must fail: verify can tell.
    result = moelora("verify", CASES + "/qwen3_moe_f32", "--model", MODEL, "--only", "base")
    check(result.returncode == 1 and " 0 passed" in result.stdout, "verify: another model's weights fail", result)


def test_inspect():
    result = moelora("inspect", MODEL)
    check(result.returncode == 0 and "Qwen3MoeForCausalLM" in result.stdout, "inspect a model", result)
    result = moelora("inspect", CASE + "/adapters/experts", "--model", MODEL)
    check(result.returncode == 0 and "experts' down" in result.stdout, "inspect an adapter", result)
    result = moelora("inspect", CASE + "/adapters/embed_head", "--model", MODEL)
    check(result.returncode == 1 and "refused" in result.stdout, "inspect says what is refused", result)


def test_bench():
    result = moelora("bench", "--model", MODEL, "--random-weights", "--concurrency", "2", "--adapters", "3", "--rank",
                     "4", "--input", "5", "--output", "24", "--requests", "6")
    check(result.returncode == 0, "bench", result)
    report = json.loads(result.stdout.splitlines()[-1])
    for key in ("output_tokens_per_s", "decode_tokens_per_s", "ttft_ms", "ttft_p99_ms", "inter_token_ms",
                "inter_token_p99_ms", "step_ms", "step_bytes", "active_experts", "ceiling_gb_per_s", "ceiling_ratio"):
        check(report.get(key, 0) > 0, f"bench reports {key}", result)
    check(any("an adapter's load" in line and "ms read" in line and "GB/s" in line
              for line in result.stdout.splitlines()), "bench tells how long adapters took to load", result)
    check(report.get("output_tokens") == 6 * 24 and report.get("concurrency") == 2 and report.get("adapters") == 3 and
          report.get("adapters_touched") == 2, "bench counts", result)
    result = moelora("bench", "--model", MODEL, "--rate", "200", "--requests", "4", "--input", "3", "--output", "4",
                     "--json")
    check(result.returncode == 0 and len(result.stdout.splitlines()) == 1, "bench --rate --json", result)
    result = moelora("bench", "--model", MODEL, "--routing", "zipf")
    check(result.returncode == 1 and "--random-weights" in result.stderr, "a routing needs random weights", result)
    active = {}
    for routing in ("random", "zipf", "one"):
        result = moelora("bench", "--model", MODEL, "--random-weights", "--routing", routing, "--zipf-exponent", "2",
                         "--concurrency", "8", "--adapters", "2", "--rank", "4", "--input", "5", "--output", "24",
                         "--json")
        check(result.returncode == 0, f"bench --routing {routing}", result)
        active[routing] = json.loads(result.stdout)["active_experts"]
    check(abs(active["one"] - 2) < 1e-9 and 2.1 < active["zipf"] < active["random"], f"active experts {active}", result)


def test_bench_trace():
    folder = os.path.join(TMP, "trace_adapters")
    shutil.rmtree(folder, ignore_errors=True)
    made = subprocess.run([MAKE_ADAPTERS, "--model", MODEL, "--out", folder, "--count", "7", "--distinct", "5",
                           "--targets", "all", "--rank", "4"], capture_output=True, text=True, timeout=60)
    check(made.returncode == 0 and made.stdout.startswith("7 adapters, 5 of them different"), "make_adapters.py", made)
    again = subprocess.run([MAKE_ADAPTERS, "--model", MODEL, "--out", folder, "--count", "1"], capture_output=True,
                           text=True, timeout=60)
    check(again.returncode == 1 and "holds adapters already" in again.stderr, "make_adapters.py overwrites",
          again)
    lengths = ("bench", "--model", MODEL, "--trace", "slora", "--input-range", "2,9", "--output-range", "2,6")
    trace = (*lengths, "--rate", "200", "--duration", "0.1")
    result = moelora(*trace, "--adapters", "0,3,7", "--repeat", "2", "--adapter-dir", folder, "--strip", "0")
    check(result.returncode == 0, "bench --trace", result)
    report = json.loads(result.stdout.splitlines()[-1])
    runs = report["runs"]
    check([(run["adapters"], run["repeat"]) for run in runs] == [(0, 0), (3, 0), (7, 0), (3, 1), (7, 1), (0, 1)],
          "bench --trace: runs by turns, another one first in each repeat", result)
    for run in runs:
        check(run["finished"] == 20 and run["failed"] == 0 and run["output_tokens"] == runs[0]["output_tokens"] and
              run["throughput"] > 0 and run["strip_throughput"] >= run["throughput"] * 0.999 and
              0 < run["first_token_s"] <= run["latency_s"] and run["slo_attainment"] == 1 and
              0.9 < run["satisfaction"] <= 1, f"bench --trace: metrics of {run}", result)
        wanted = {0: 0, 3: 3, 7: 7}[run["adapters"]]
        check(run["adapters_touched"] == wanted and run["adapter_loads"] == wanted,
              f"bench --trace: adapters are met cold: {run}", result)
    check([(ratio["adapters"], ratio["of"], len(ratio["each"])) for ratio in report["ratios"]] ==
          [(3, 0, 2), (7, 0, 2), (7, 3, 2)], "bench --trace: ratios", result)
    check("throughput with 7 adapters" in result.stdout and "% of that with 3" in result.stdout,
          "bench --trace: the table has ratios", result)
    result = moelora(*trace, "--adapters", "2", "--rank", "4", "--targets", "attention", "--json", "--slo", "1e-9")
    check(result.returncode == 0 and len(result.stdout.splitlines()) == 1 and
          json.loads(result.stdout)["runs"][0]["slo_attainment"] == 0, "bench --trace: random adapters, --slo", result)
    plain = ("bench", "--model", MODEL, "--trace", "slora")
    for flags, word in (((*plain, "--adapters", "8", "--adapter-dir", folder), folder + "/7"),
                        ((*plain, "--concurrency", "2"), "--concurrency"),
                        ((*plain, "--input-range", "9,9"), "--input-range"),
                        ((*plain, "--output-range", "2,100000"), "context")):
        result = moelora(*flags)
        check(result.returncode == 1 and word in result.stderr, f"{flags} is refused", result)
    result = moelora("bench", "--model", MODEL, "--adapters", "1,2")
    check(result.returncode == 1 and "--trace" in result.stderr, "several --adapters need --trace", result)
    result = moelora(*lengths, "--set", "max_queued_requests=1", "--set", "max_num_sequences=1", "--rate", "100000",
                     "--duration", "0.001")
    check(result.returncode == 1 and "E_OVERLOADED" in result.stdout, "bench --trace says what was refused", result)


def test_timeline():
    path = os.path.join(TMP, "timeline.json")
    result = moelora("run", "--model", MODEL, *adapter("attn"), "--timeline", path,
                     stdin=request("a", "attn", 7) + "\n" + request("b", "base", 33) + "\n")
    check(result.returncode == 0, "run --timeline", result)
    with open(path, encoding="utf-8") as file:
        events = json.load(file)["traceEvents"]
    tracks = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    slices = [(tracks[event["tid"]], event["name"]) for event in events if event["ph"] == "X"]
    check(("uploads of adapters", "attn") in slices and ("steps", "decode") in slices, "the timeline's slices", result)
    check(sorted(event["name"] for event in events if event["ph"] == "b" and "args" in event) == ["attn", "base"],
          "the timeline's requests", result)
    result = moelora("run", "--model", MODEL, "--timeline", "/nowhere/at.json", stdin=request("b", "base", 1) + "\n")
    check(result.returncode == 1 and "/nowhere/at.json" in result.stderr, "a timeline that cannot be written", result)


def running(*arguments):
    pipe = subprocess.PIPE
    return subprocess.Popen([MOELORA, *arguments], stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=ENVIRONMENT)


def test_top():
    result = moelora("top", "--once")
    check(result.returncode == 1 and "no running moelora" in result.stderr, "top without anything to see", result)
    with running("run", "--model", MODEL, *adapter("attn")) as process:
        process.stdin.write(request("a", "attn", 7) + "\n")
        process.stdin.flush()
        process.stdout.readline()  # it is answered, and the process waits for more
        result = moelora("top", "--once", "--interval", "0.1")
        check(result.returncode == 0, "top --once", result)
        page = result.stdout.splitlines()
        check(page[0].startswith(f"moelora run, pid {process.pid}, model, ") and "0 running, 0 waiting" in page[1] and
              "1 in all, 0 failed" in page[1] and "1 registered, 1 on the device" in page[4], "top: the page", result)
        check(len(page) == 8 and page[7].split()[:2] == ["attn", "1"] and page[7].split()[-1] == "yes",
              "top: the adapter's line", result)
        check(not re.search(r"[^\x20-\x7e\n]", result.stdout), "top: plain text where no terminal is", result)
        folder = os.path.join(RUNTIME, "moelora")
        check(stat.S_IMODE(os.stat(folder).st_mode) == 0o700, "top: the folder is its user's alone")
        with running("run", "--model", MODEL) as second:
            second.stdin.write(request("a", "base", 1) + "\n")
            second.stdin.flush()
            second.stdout.readline()
            result = moelora("top", "--once")
            check(result.returncode == 1 and str(process.pid) in result.stderr and str(second.pid) in result.stderr,
                  "top: several to choose from", result)
            result = moelora("top", "--once", "--interval", "0.1", "--pid", str(second.pid))
            check(result.stdout.startswith(f"moelora run, pid {second.pid},"), "top --pid", result)
            second.kill()  # its socket stays behind
        result = moelora("top", "--once", "--interval", "0.1", "--adapters", "0")
        check(result.returncode == 0 and len(result.stdout.splitlines()) == 7 - 1, "top: dead processes are no choice",
              result)
        process.stdin.close()
        process.wait(timeout=60)
    check(os.listdir(folder) == [], "top: nothing is left behind")
    with running("run", "--model", MODEL, "--no-live") as process:
        process.stdin.write(request("a", "base", 1) + "\n")
        process.stdin.flush()
        process.stdout.readline()
        result = moelora("top", "--once", "--pid", str(process.pid))
        check(result.returncode == 1 and str(process.pid) in result.stderr, "--no-live", result)
        process.stdin.close()
    with running("bench", "--model", MODEL, "--trace", "slora", "--rate", "20", "--duration", "60", "--adapters", "3",
                 "--rank", "4", "--input-range", "2,4", "--output-range", "2,4") as process:
        seen = moelora("top", "--once", "--interval", "0.1")
        until = time.monotonic() + 60
        while seen.returncode != 0 and time.monotonic() < until:
            seen = moelora("top", "--once", "--interval", "0.1")
        check(seen.stdout.startswith(f"moelora bench --trace slora, pid {process.pid},") and
              "3 registered" in seen.stdout, "top sees a bench", seen)
        process.kill()


for name, function in list(globals().items()):
    if name.startswith("test_"):
        print("==", name)
        function()
shutil.rmtree(RUNTIME)
print(f"{len(failures)} failures")
sys.exit(1 if failures else 0)
