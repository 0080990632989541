"""lm-eval's `local-completions`: whole tasks, and log-likelihoods of continuations, against those of `quadriga eval`. Its requests are also
sent one by one."""
import json
import os
import pathlib
import subprocess
import tempfile
import unittest
import urllib.request

import server

TEXTS = [
    "The capital of France is Paris, and the capital of Italy is Rome.",
    "Water boils at one hundred degrees and freezes at zero.",
    "def add(a, b):\n    return a + b\n",
]


def evaluate(cases):
    """The results of `quadriga eval`."""
    with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as file:
        file.write("".join(json.dumps(case) + "\n" for case in cases))
        file.flush()
        done = subprocess.run([server.BINARY, "eval", "--quiet", file.name], check=True, capture_output=True, text=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


def complete(prompts):
    """What lm-eval sends for log-likelihoods, and what it reads of the answer."""
    body = {
        "model": "smollm2",
        "prompt": prompts,
        "temperature": 0,
        "max_tokens": 1,
        "logprobs": 1,
        "seed": 1234,
        "echo": True,
    }
    request = urllib.request.Request(
        server.default() + "/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        choices = json.load(answer)["choices"]
    return [choice["logprobs"] for choice in sorted(choices, key=lambda choice: choice["index"])]


def tokenized(texts):
    """The tokens of each text."""
    return [case["tokens"] for case in evaluate([{"name": "t", "kind": "tokenize", "text": text} for text in texts])]


class LmEval(unittest.TestCase):
    def test_lm_eval_itself(self):
        from lm_eval.models.openai_completions import LocalCompletionsAPI

        model = LocalCompletionsAPI(
            base_url=server.default() + "/v1/completions", model="smollm2", tokenizer_backend="None", batch_size=4, max_retries=1
        )
        # The texts are tokenized already: its own tokenizers would be downloaded.
        model.tokenizer, model.tokenized_requests = object(), True
        tokens = tokenized(TEXTS)
        exact = evaluate([{"name": "n", "kind": "nll", "text": text, "ctx": len(each)} for text, each in zip(TEXTS, tokens)])
        found = model._loglikelihood_tokens([((None, text), each[:1], each[1:]) for text, each in zip(TEXTS, tokens)])
        for each, (likelihood, is_greedy), wanted in zip(tokens, found, exact):
            self.assertAlmostEqual(-likelihood / (len(each) - 1), wanted["nll"], delta=0.02)
            self.assertFalse(is_greedy, "no model would have written all of it")
        paris, rome = tokenized(["The capital of France is Paris", "The capital of France is Rome"])
        pairs = [((None, None), each[:-1], each[-1:]) for each in (paris, rome)]
        (of_paris, is_greedy), (of_rome, _) = model._loglikelihood_tokens(pairs)
        self.assertGreater(of_paris, of_rome)
        self.assertTrue(is_greedy)

    def test_tasks(self):
        """Tasks of lm-eval's own form, from their files to their results: texts to choose from, and texts to generate."""
        import lm_eval
        from lm_eval.tasks import TaskManager

        os.environ.update(HF_DATASETS_OFFLINE="1", HF_HUB_OFFLINE="1")
        folder = pathlib.Path(__file__).parent / "tasks"
        with tempfile.TemporaryDirectory() as home:
            # The file of the questions is found by an absolute path.
            for task in folder.glob("*.yaml"):
                text = task.read_text().replace("QUESTIONS", str(folder / "capitals.jsonl"))
                pathlib.Path(home, task.name).write_text(text)
            os.environ["HF_DATASETS_CACHE"] = home
            results = lm_eval.simple_evaluate(
                model="local-completions",
                # The server tokenizes.
                model_args={
                    "base_url": server.default() + "/v1/completions",
                    "model": "smollm2",
                    "tokenizer_backend": "remote",
                    "max_retries": 1,
                    "max_length": 512,
                },
                tasks=["capitals_choice", "capitals_text"],
                task_manager=TaskManager(include_path=home, include_defaults=False),
                batch_size=4,
                bootstrap_iters=0,
            )["results"]
        self.assertGreaterEqual(results["capitals_choice"]["acc,none"], 0.75, results)
        self.assertGreaterEqual(results["capitals_text"]["exact_match,none"], 0.5, results)

    def test_loglikelihoods_are_those_of_eval(self):
        tokens = [case["tokens"] for case in evaluate([{"name": "t", "kind": "tokenize", "text": text} for text in TEXTS])]
        # One chunk with the whole text.
        lengths = [len(each) for each in tokens]
        exact = evaluate([{"name": "n", "kind": "nll", "text": text, "ctx": length} for text, length in zip(TEXTS, lengths)])
        # All at once, as with a batch size of its own.
        for each, logprobs, wanted in zip(tokens, complete(tokens), exact):
            self.assertEqual(len(logprobs["token_logprobs"]), len(each) + 1, "the prompt, and one token")
            found = logprobs["token_logprobs"][:-1]
            self.assertIsNone(found[0], "nothing is before the first token")
            mean = -sum(found[1:]) / len(found[1:])
            self.assertAlmostEqual(mean, wanted["nll"], delta=0.02)
            # lm-eval calls a continuation greedy if each of its tokens is the most probable one.
            for token, value, top in zip(logprobs["tokens"][1:-1], found[1:], logprobs["top_logprobs"][1:-1]):
                self.assertLessEqual(value, max(top.values()) + 1e-6, token)

    def test_continuations_are_ranked(self):
        choices = ["The capital of France is Paris", "The capital of France is Rome"]
        tokens = [case["tokens"] for case in evaluate([{"name": "t", "kind": "tokenize", "text": text} for text in choices])]
        self.assertEqual(tokens[0][:-1], tokens[1][:-1])
        paris, rome = [logprobs["token_logprobs"][-2] for logprobs in complete(tokens)]
        self.assertGreater(paris, rome)


if __name__ == "__main__":
    unittest.main()
