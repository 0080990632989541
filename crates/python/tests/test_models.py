"""Loading and closing models, errors of files, the KV cache as bytes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import quadriga
from quadriga.llama_cpp import Llama


def test_missing_and_broken_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(quadriga.ModelNotFound, match="nothing.gguf"):
        quadriga.Model(tmp_path / "nothing.gguf")
    with pytest.raises(FileNotFoundError):
        quadriga.Model("no such model")
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF" + bytes(100))
    with pytest.raises(quadriga.ModelError, match="broken.gguf"):
        quadriga.Model(broken)
    with pytest.raises(quadriga.InvalidRequest, match="npu"):
        quadriga.Model(broken, devices=["npu"])
    with pytest.raises(quadriga.InvalidRequest, match="n_parallel"):
        quadriga.Model(broken, n_parallel=0)


def test_a_model_of_the_hub_that_is_not_cached_needs_the_network(tmp_path: Path) -> None:
    with pytest.raises(quadriga.HubError, match="owner/name"):
        quadriga.Model("owner/name:Q4_0", offline=True, cache_dir=tmp_path)


def test_too_little_memory_is_its_own_error(tiny_path: Path) -> None:
    with pytest.raises(quadriga.OutOfMemory):
        quadriga.Model(tiny_path, n_ctx=2048, devices=["sim:0"], n_gpu_layers="all", vram_budget=1000)
    assert issubclass(quadriga.OutOfMemory, MemoryError)


def test_a_closed_model_says_so(tiny_path: Path) -> None:
    model = quadriga.Model(tiny_path)
    stream = model.generate([1, 2, 3], stream=True, ignore_eos=True)
    next(stream)
    model.close()
    model.close()
    with pytest.raises(quadriga.Closed):
        list(stream)
    with pytest.raises(quadriga.Closed):
        model.generate([1, 2, 3])


def test_two_devices_give_the_same_tokens(tiny_path: Path, tiny: quadriga.Model) -> None:
    with quadriga.Model(tiny_path, n_ctx=512, devices=["sim:0", "cpu"], n_gpu_layers=2) as split:
        assert split.devices == ["sim:0", "cpu"]
        tokens = list(range(1, 20))
        whole = tiny.generate(tokens, temperature=0, max_tokens=8, ignore_eos=True)
        assert split.generate(tokens, temperature=0, max_tokens=8, ignore_eos=True).tokens == whole.tokens


@pytest.mark.parametrize("architecture", ["gpt-oss", "gemma3"])
def test_models_with_sliding_windows_generate_evaluate_and_embed(tmp_path: Path, architecture: str) -> None:
    path = tmp_path / "windows.gguf"
    command = [sys.executable, "-m", "quadriga", "synth", "-o", str(path), "--arch", architecture, "--type", "f32"]
    subprocess.run(command, check=True, capture_output=True)
    tokens = [int(token) for token in np.random.default_rng(9).integers(3, 200, 700)]
    with quadriga.Model(path) as model:
        answer = model.generate(tokens, temperature=0, max_tokens=4, ignore_eos=True)
        rows = np.asarray(model.logits([*tokens, *answer.tokens]))
        assert [int(row.argmax()) for row in rows[len(tokens) - 1 : -1]] == answer.tokens
        assert np.isfinite(np.asarray(model.embed("a cat"))).all()


def test_a_saved_kv_cache_is_found_by_another_model(tiny_path: Path) -> None:
    tokens = [int(token) for token in np.random.default_rng(7).integers(3, 200, 300)]
    with quadriga.Model(tiny_path, n_ctx=1024) as first:
        wanted = first.generate(tokens, temperature=0, max_tokens=8, ignore_eos=True)
        saved = first.save_state(tokens)
        assert wanted.usage.cached_tokens == 0
    with quadriga.Model(tiny_path, n_ctx=1024) as second:
        assert second.load_state(saved) == 256
        again = second.generate(tokens, temperature=0, max_tokens=8, ignore_eos=True)
        assert again.usage.cached_tokens == 256
        assert again.tokens == wanted.tokens
        second.clear_cache()
        assert second.generate(tokens, temperature=0, max_tokens=1).usage.cached_tokens == 0
        with pytest.raises(quadriga.StateError):
            second.load_state(saved[: len(saved) // 2])
        with pytest.raises(quadriga.StateError):
            second.load_state(b"something else")
        damaged = bytearray(saved)
        damaged[len(saved) // 2] ^= 1
        with pytest.raises(quadriga.StateError, match="damaged"):
            second.load_state(bytes(damaged))
        # What was not computed is not there.
        assert second.load_state(second.save_state([5] * 200)) == 0
    with quadriga.Model(tiny_path, n_ctx=1024, cache_type="f32") as other:
        with pytest.raises(quadriga.StateError):
            other.load_state(saved)


def test_a_folder_of_peft_is_an_adapter(tiny_path: Path, tmp_path: Path) -> None:
    folder = tmp_path / "peft"
    folder.mkdir()
    with quadriga.Model(tiny_path, n_ctx=256) as model:
        width = model.n_embd
        plain = np.asarray(model.logits([5, 6, 7]))
    (folder / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 2, "lora_alpha": 4}')
    header: dict[str, object] = {}
    data = b""
    for end, shape in (("A", (2, width)), ("B", (width, 2))):
        matrix = np.random.default_rng(3).standard_normal(shape, dtype=np.float32).tobytes()
        name = f"base_model.model.model.layers.0.self_attn.q_proj.lora_{end}.weight"
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [len(data), len(data) + len(matrix)]}
        data += matrix
    text = json.dumps(header).encode()
    (folder / "adapter_model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)
    with quadriga.Model(tiny_path, n_ctx=256, lora=[folder]) as model:
        changed = np.asarray(model.logits([5, 6, 7]))
    assert np.abs(changed - plain).max() > 1e-2
    llama = Llama(model_path=tiny_path, lora_path=str(folder), n_ctx=256)
    assert np.abs(np.asarray(llama.model.logits([5, 6, 7])) - changed).max() < 1e-5
    llama.close()
    (folder / "adapter_config.json").write_text('{"peft_type": "IA3", "lora_alpha": 4}')
    with pytest.raises(quadriga.ModelError, match="adapter_config.json.*IA3"):
        quadriga.Model(tiny_path, lora=folder)


def test_prefixes_are_computed_once(tiny: quadriga.Model) -> None:
    tokens = [int(token) for token in np.random.default_rng(8).integers(3, 200, 200)]
    assert tiny.generate(tokens, max_tokens=1).usage.cached_tokens == 0
    assert tiny.generate([*tokens, 5, 6], max_tokens=1).usage.cached_tokens == 192
