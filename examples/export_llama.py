"""Export a Llama with ExecuTorch's own script, unchanged and with its constants streamed, and compare time and memory.

    python examples/export_llama.py FOLDER
    python examples/export_llama.py FOLDER --params 1b -- -X -qmode 8da4w --embedding-quantize 4,32 -kv
    python examples/export_llama.py FOLDER --params params.json --checkpoint consolidated.00.pth -- -kv
    python examples/export_llama.py FOLDER -- --mps -kv --disable_dynamic_shape

Arguments after ``--`` are passed to ``executorch.examples.models.llama.export_llama``; without any, the model is
exported in float32, and no delegate takes its constants.  ExecuTorch 1.4.1 and 1.5.1 both work (1.4.1 for ``--mps``,
which it takes only with ``--disable_dynamic_shape``), and install all that the script imports.  Without a checkpoint,
one with random weights is made in the folder; the script maps it into memory, as it does any.

Each export runs in its own process, which stderr tells when it begins.  Then the two programs are compared byte by
byte, and each runs one token, unless this machine's runtime lacks a backend that it needs (MPS runs only on a Mac).
"""

from __future__ import annotations

import argparse
import filecmp
import hashlib
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Contents of a params.json.  "1b" is Llama 3.2 1B, except that its output is not tied to its embedding.
PARAMS = {
    "toy": {"dim": 128, "n_layers": 1, "n_heads": 4, "vocab_size": 256, "multiple_of": 128},
    "1b": {
        "dim": 2048,
        "n_layers": 16,
        "n_heads": 32,
        "n_kv_heads": 8,
        "vocab_size": 128256,
        "multiple_of": 256,
        "ffn_dim_multiplier": 1.5,
        "norm_eps": 1e-05,
        "rope_theta": 500000.0,
        "use_scaled_rope": True,
    },
}
SAMPLE_SECONDS = 0.002
LOGGED_BEFORE_EXPORT = "Exporting with:"  # by ExecuTorch's script, when the model is complete


def main() -> None:
    """Export twice, compare, run."""
    arguments, flags = parse(sys.argv[1:])
    folder: Path = arguments.folder
    folder.mkdir(parents=True, exist_ok=True)
    params, checkpoint = arguments.params, arguments.checkpoint
    if params in PARAMS:
        params = folder / "params.json"
        params.write_text(json.dumps(PARAMS[arguments.params]))
    if checkpoint is None:
        checkpoint = folder / "random.pth"
        run_step("make", params, checkpoint)

    programs = {way: folder / f"{way}.pte" for way in arguments.only or ("stock", "streamed")}
    print(f"{'':10}{'seconds':>10}{'peak MiB':>12}{'model MiB':>12}{'added MiB':>12}")
    for way, program in programs.items():
        argv = ("--model", "llama3_2", "--params", params, "--checkpoint", checkpoint)
        done = run_step(way, *argv, "--output-dir", folder, "--output_name", program, *flags)
        held, peak = done.memory_from(done.answer["begun"])
        figures = (f"{nbytes / 2**20:12,.0f}" for nbytes in (peak, held, peak - held))
        print(f"{way:10}{done.answer['seconds']:10.1f}{''.join(figures)}", flush=True)
    if len(programs) == 2:
        same = filecmp.cmp(programs["stock"], programs["streamed"], shallow=False)
        print(f"the two programs are {'equal, byte for byte' if same else 'different'}", flush=True)
    if arguments.run:
        run_both(programs)


def run_both(programs: dict[str, Path]) -> None:
    """Run a token through each program, or say why that cannot be done here."""
    ran = {way: run_step("run", program).answer for way, program in programs.items()}
    for way, answer in ran.items():
        if answer["missing"]:
            print(f"{way:10}not run: the runtime on this machine has no {', '.join(answer['missing'])}")
        else:
            print(f"{way:10}next token after {answer['token']}: {answer['next']}")
    if len({answer.get("logits") for answer in ran.values()}) > 1:
        sys.exit("the two programs do not compute the same logits")


def parse(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Our arguments, and those for ExecuTorch's script."""
    end = argv.index("--") if "--" in argv else len(argv)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="for the programs, and temporarily for constants")
    parser.add_argument("--params", default="toy", help="toy, 1b, or a params.json")
    parser.add_argument("--checkpoint", type=Path, help="written by torch.save (default: random weights)")
    parser.add_argument("--only", choices=("stock", "streamed"), nargs=1, help="run only this export")
    parser.add_argument("--no-run", dest="run", action="store_false", help="do not run a token")
    return parser.parse_args(argv[:end]), argv[end + 1 :]


# Steps, each in its own process.  The last line that a step prints is its answer, as JSON.


def make(params: str, checkpoint: str) -> dict[str, Any]:
    """Save random weights with the shapes that ``params`` describes, in bfloat16 like Llama's own."""
    import torch
    from executorch.examples.models.llama.llama_transformer import construct_transformer
    from executorch.examples.models.llama.model_args import ModelArgs

    generator = torch.Generator().manual_seed(0)
    with torch.device("meta"):
        shapes = construct_transformer(ModelArgs(**json.loads(Path(params).read_text())))
    state = {}
    for name, parameter in shapes.state_dict().items():
        weight = state[name] = torch.ones(parameter.shape, dtype=torch.bfloat16)
        if weight.dim() > 1:  # a norm's weights are vectors, and stay 1
            weight.normal_(0, 0.02, generator=generator)
    torch.save(state, checkpoint)
    return {}


def stock(*argv: str) -> dict[str, Any]:
    """Export as ``python -m executorch.examples.models.llama.export_llama`` does."""
    return export(argv, nullcontext())


def streamed(*argv: str) -> dict[str, Any]:
    """Export in a block of ``streaming_constants``; constants are temporarily in the folder of the program.

    ``alignment="stock"`` is only for comparing the bytes; by default, segments begin on pages.
    """
    from stream_pack.executorch import streaming_constants

    folder = argv[argv.index("--output-dir") + 1]
    return export(argv, streaming_constants(folder, alignment="stock"))


def export(argv: tuple[str, ...], block: AbstractContextManager[None]) -> dict[str, Any]:
    import torch
    from executorch.examples.models.llama.export_llama_lib import build_args_parser, export_llama

    clock = LogClock()
    logging.getLogger().addHandler(clock)
    logging.getLogger().setLevel(logging.INFO)
    torch.manual_seed(42)
    sys.setrecursionlimit(4096)
    arguments = build_args_parser().parse_args(argv)
    began = time.monotonic()
    with block:
        program = Path(export_llama(arguments))
    with program.open("rb") as file:
        os.fsync(file.fileno())
        # The script only logs an error of writing.
        if file.read(8)[4:] != b"ET12":
            sys.exit(f"{program} is not an ExecuTorch program: look for an error in the log above")
    return {"seconds": time.monotonic() - began, "begun": clock.read}


class LogClock(logging.Handler):
    """Notes the time when the script has built the model and says that it begins the export."""

    read = 0.0

    def emit(self, record: logging.LogRecord) -> None:
        if not self.read and record.getMessage() == LOGGED_BEFORE_EXPORT:
            self.read = time.monotonic()


def run(program: str) -> dict[str, Any]:
    """Run one token in ExecuTorch's runtime, if that has all ``missing`` backends."""
    import torch
    from executorch.extension.llm.custom_ops import custom_ops  # noqa: F401  registers operators
    from executorch.extension.pybindings.portable_lib import _get_registered_backend_names, _load_for_executorch
    from executorch.kernels import quantized  # noqa: F401  registers operators

    import stream_pack

    needed = {payload.backend for payload in stream_pack.inspect(program).payloads}
    missing = sorted(needed - set(_get_registered_backend_names()))
    if missing:
        return {"missing": missing}
    module = _load_for_executorch(program)
    method = module.method_meta("forward")
    token = 1
    if module.run_method("enable_dynamic_shape")[0]:
        tokens = torch.tensor([[token]])
    else:
        tokens = torch.full(method.input_tensor_meta(0).sizes(), token)
    position = [torch.tensor([0])] if method.num_inputs() == 2 else []
    logits = module.forward([tokens, *position])[0]
    if not logits.isfinite().all():
        sys.exit(f"the logits of {program} are not finite")
    return {
        "missing": [],
        "token": token,
        "next": int(logits[0].argmax()),
        "logits": hashlib.sha256(logits.numpy().tobytes()).hexdigest(),
    }


BEGINS = {
    "make": "making random weights",
    "stock": "exporting with ExecuTorch alone",
    "streamed": "exporting with constants streamed",
    "run": "running a token",
}
STEPS: dict[str, Callable[..., dict[str, Any]]] = {step.__name__: step for step in (make, stock, streamed, run)}


@dataclass(frozen=True, slots=True)
class Done:
    """A step that succeeded: its answer, and samples of (monotonic time, anonymous memory in bytes)."""

    answer: dict[str, Any]
    samples: list[tuple[float, int]]

    def memory_from(self, moment: float) -> tuple[int, int]:
        """The memory at a moment, and the most from then on.  (0, 0) where there is no /proc."""
        later = [nbytes for when, nbytes in self.samples if when >= moment]
        return (later[0], max(later)) if later else (0, 0)


def run_step(name: str, *words: str | os.PathLike[str]) -> Done:
    """Run a step of :data:`STEPS` in its own process, and sample its memory."""
    argv = [sys.executable, __file__, name, *(os.fspath(word) for word in words)]
    print(f"{BEGINS[name]} ...", file=sys.stderr, flush=True)
    with tempfile.TemporaryFile() as stdout, tempfile.TemporaryFile() as stderr:
        process = subprocess.Popen(argv, stdout=stdout, stderr=stderr)
        samples = []
        while process.poll() is None:
            samples.append((time.monotonic(), anonymous_nbytes(process.pid)))
            time.sleep(SAMPLE_SECONDS)
        for file in (stdout, stderr):
            file.seek(0)
        if process.returncode:
            text = stderr.read().decode(errors="replace")
            sys.exit(f"{text}\nthe step {name!r} ({BEGINS[name]}) failed")
        return Done(json.loads(stdout.read().splitlines()[-1]), samples)


def anonymous_nbytes(pid: int) -> int:
    """Resident memory of a process that is not backed by a file: it counts when a machine runs out of memory."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    fields = dict(line.split(":", 1) for line in status.splitlines())
    return int(fields.get("RssAnon", "0 kB").split()[0]) * 1024


if __name__ == "__main__":
    if len(sys.argv) > 1 and sys.argv[1] in STEPS:
        print(json.dumps(STEPS[sys.argv[1]](*sys.argv[2:])))
    else:
        main()
