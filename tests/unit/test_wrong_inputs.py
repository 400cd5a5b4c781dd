"""What every command answers to a wrong input: one sentence on standard error, exit code 2, and no traceback."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from topologies import topology_of

from holmes.planning.plan import plan_for
from holmes.tools.cli import main

SIZES = {"layers": 30, "hidden": 64, "heads": 4, "sequence": 16, "vocabulary": 64}
SEARCH = "plan --topology {topology} --model gpt-3.6b --gpu A100-80GB --global-batch"
COMPUTE = "bench compute --hidden 64 --heads 4 --sequence 16"
BENCH = "bench barrier --peers none --ranks 2 --seconds 0.01 --rounds 1"

#: The command line, and words that its sentence must have.
WRONG = [
    ("nosuchcommand", "nosuchcommand"),
    ("nics --nosuchoption", "--nosuchoption"),
    ("nics --json {unwritable}/n.json", "n.json"),
    ("nics --json {folder}", "is a folder"),
    ("nics --json", "--json"),
    ("nics --sysfs-root {folder}/nowhere", "nowhere"),
    ("topology {folder}/nowhere.yaml", "nowhere.yaml: No such file"),
    ("topology {binary}", "binary.yaml cannot be read as yaml"),
    ("topology {empty}", "must hold a mapping"),
    ("topology {twice}", "the key 'nodes' stands twice"),
    ("topology {many}", "100000000000"),
    ("topology {topology} --measure-s 3", "--measure-s: nothing is measured where a file is read"),
    ("topology {topology} --timeout-s 1 --join-timeout-s 9", "--timeout-s, --join-timeout-s: nothing is measured"),
    ("topology {topology} --save {unwritable}/t.yaml", "t.yaml"),
    ("topology {topology} --draw {unwritable}/t.svg", "t.svg"),
    ("topology {topology} --draw {folder}/t.nosuchformat", "nosuchformat"),
    ("plan show {folder}/nowhere.yaml", "nowhere.yaml: No such file"),
    ("plan show {binary}", "binary.yaml cannot be read as yaml"),
    ("plan show {folder}/json/twice.json", "the key 'kind' stands twice"),
    ("plan show {topology}", "topology.yaml: expected a 'holmes plan' file"),
    ("plan show {plan} --rank 99", "ranks are 0 to 7"),
    ("plan show {plan} --rank -1", "ranks are 0 to 7"),
    ("plan show {plan} --kind nosuchkind", "nosuchkind"),
    ("plan explain {plan}", "keeps no reasons"),
    ("plan explain {topology}", "topology.yaml: expected"),
    ("plan check {plan} --topology {binary}", "cannot be read as yaml"),
    ("plan check {words} --topology {topology}", "words.yaml: groups.dp is 7; it must be a list"),
    (
        "plan check {bare} --topology {topology}",
        "bare.yaml: groups.dp[0] is 0; a group must be a list of ranks such as",
    ),
    ("plan check {endless} --topology {topology}", "'0-9999999999' goes beyond 10,000,000 numbers"),
    ("plan check {none} --topology {topology}", "there are no groups to check"),
    ("plan check {rates} --topology {topology}", "rates.yaml: neither a plan"),
    ("plan check {plan} --topology {plan}", "plan.yaml: expected a 'holmes topology' file"),
    ("plan check {unfit} --topology {topology}", "unfit.yaml: "),
    ("plan export {plan} --to nosuchtrainer", "nosuchtrainer"),
    ("plan export {unfit} --to megatron", "31 layers"),
    ("plan export {topology} --to megatron", "topology.yaml: expected"),
    ("plan --model gpt-3.6b --global-batch 64", "--topology"),
    (f"{SEARCH} 99999999999999", "99999999999999"),
    (f"{SEARCH} 0", "global_batch=0"),
    (f"{SEARCH} -64", "global_batch=-64"),
    (f"{SEARCH} many", "--global-batch"),
    (f"{SEARCH} 64 --micro-batch 0", "micro_batch=0"),
    (f"{SEARCH} 64 --simulated 0", "simulated=0"),
    (f"{SEARCH} 64 --tensor 3", "tensor=3"),
    (f"{SEARCH} 64 --schedule nosuch", "nosuch"),
    (f"{SEARCH} 64 --for nosuchtrainer", "nosuchtrainer"),
    (f"{SEARCH} 64 --for deepspeed --schedule zb-h1", "zb-h1"),
    (f"{SEARCH} 64 --output {{unwritable}}/plan.yaml", "plan.yaml"),
    (f"{SEARCH} 64 --output {{folder}}/plan.nosuch", "plan.nosuch"),
    (f"{SEARCH} 64 --efficiency nan", "efficiency=nan"),
    (f"{SEARCH} 64 --efficiency .3 --compute-tflops 100", "--efficiency 0.3 and --compute-tflops 100.0 both say"),
    (f"{SEARCH} 64 --reserve-gib nan", "reserve_gib=nan"),
    ("plan --topology {topology} --model nosuchmodel --global-batch 64", "nosuchmodel"),
    ("plan --topology {topology} --model {binary} --global-batch 64", "cannot be read as yaml"),
    ("plan --topology {topology} --model {rates} --global-batch 64", "rates.yaml: a model has no field"),
    ("simulate {plan} --topology {larger} --rates {rates}", "8 ranks"),
    ("simulate {plan} --topology {topology} --rates {binary}", "cannot be read as yaml"),
    ("simulate {plan} --topology {topology} --rates {plan}", "plan.yaml: expected a 'holmes rates' file"),
    ("simulate {plan} --topology {topology} --rates {rates} --model gpt-7.5b", "36"),
    ("simulate {plan} --topology {topology} --rates {rates} --global-batch 0", "global_batch=0"),
    ("simulate {plan} --topology {topology} --rates {rates} --micro-batch -1", "micro_batch=-1"),
    ("simulate {plan} --topology {topology} --rates {rates} --plot {unwritable}/s.png", "s.png"),
    ("simulate {plan} --topology {topology} --rates {rates} --trace {unwritable}/s.json", "s.json"),
    ("simulate calibrate {folder}/rates.yaml --link ethernet={folder}/nowhere.json", "nowhere.json"),
    ("simulate calibrate {folder}/rates.yaml --link ethernet", "CLASS=FILE"),
    ("simulate calibrate {folder}/rates.yaml --compute {binary}", "binary.yaml"),
    ("testbed show {folder}/nowhere.yaml", "nowhere.yaml"),
    ("testbed show {binary}", "binary.yaml"),
    ("testbed show {twice}", "the key 'nodes' stands twice"),
    ("testbed show {lossy}", "networks.eth.loss_percent is 200; it must be a number from 0 to 99"),
    ("testbed check {binary}", "binary.yaml"),
    ("testbed check nosuchspec", "nosuchspec"),
    ("testbed check {lossy}", "networks.eth.loss_percent is 200"),
    ("testbed check pair --json {unwritable}/c.json", "c.json"),
    ("testbed run --spec {binary} -- true", "binary.yaml"),
    ("testbed run --log-dir {unwritable}/logs -- true", "logs"),
    ("testbed run --log-dir {binary} -- true", "binary.yaml: File exists; name a folder of yours"),
    ("testbed run --spec nosuchspec -- true", "nosuchspec"),
    ("testbed run --changes {folder}/nowhere.yaml -- true", "nowhere.yaml"),
    ("testbed run --changes {binary} -- true", "binary.yaml"),
    ("testbed run --changes {words} -- true", "words.yaml: changes is None"),
    ("bench nosuchoperation", "nosuchoperation"),
    (f"{BENCH} --ranks 0", "ranks is 0"),
    (f"{BENCH} --dtype nosuch", "nosuch"),
    (f"{BENCH} --testbed {{binary}}", "binary.yaml"),
    (f"{BENCH} --json {{unwritable}}/b.json", "b.json"),
    (f"{BENCH} --plot {{unwritable}}/b.png", "b.png"),
    (f"{BENCH} --plot {{folder}}/b.nosuchformat", "nosuchformat"),
    (f"{BENCH} --json {{folder}}", "is a folder"),
    (f"{COMPUTE} --device nowhere", "nowhere"),
    (f"{COMPUTE} --ranks many", "many"),
    (f"{COMPUTE} --hidden 0", "hidden=0"),
    (f"{COMPUTE} --json {{unwritable}}/c.json", "c.json"),
    ("debug {folder}/nowhere", "no folder and no process number"),
    ("debug {folder}", "has no record of a process"),
    ("debug 4194304999", "4194304999"),
    ("debug --trace {unwritable}/t.json", "t.json"),
    ("debug --steps {binary}", "--steps is for --trace"),
    ("debug --trace {folder}/t.json --steps {binary}", "is no timeline"),
    ("debug --trace {folder}/t.json --steps {folder}/nowhere.json", "nowhere.json: No such file"),
    ("top 4194304999", "4194304999"),
    ("top nosuchplace", "HOST:PORT"),
    ("top 127.0.0.1:1", "127.0.0.1:1: no answer: Connection refused; set HOLMES_METRICS_PORT"),
    ("top 127.0.0.1:9-1", "the lower one first"),
    ("top 127.0.0.1:70000", "1 to 65535"),
    ("top 127.0.0.1:1 --testbed", "--testbed"),
    ("top --every 0", "--every"),
    ("top --json {unwritable}/t.json", "t.json"),
    ("nics --matrix --sysfs-root {folder}/nowhere", "nowhere"),
    ("topology {binary} --matrix", "cannot be read as yaml"),
    ("report", "FILE"),
    ("report {unwritable}/r.html", "r.html"),
    ("report {folder}/r.txt", ".html"),
    ("report {folder}/r.html --topology {binary}", "cannot be read as yaml"),
    ("report {folder}/r.html --plan {topology}", "holmes plan"),
    ("report {folder}/r.html --bench {topology}", "no file of `holmes bench --json`"),
    ("report {folder}/r.html --plan {plan} --topology {larger}", "8 ranks, the topology has 32"),
    ("doctor --plan {folder}/nowhere.yaml", "nowhere.yaml"),
    ("doctor --plan {binary}", "cannot be read as yaml"),
    ("doctor --plan {topology}", "topology.yaml: expected"),
    ("stress", "several ranks"),
    ("stress --max-bytes nosuch", "nosuch"),
    ("stress --testbed", "--faults"),
    ("stress --minutes 1 --seconds 5", "--seconds says nothing here"),
    ("stress --episode 3", "--episode says nothing here"),
    ("stress --lease-s 8", "--lease-s says nothing here"),
    ("stress --testbed --faults kill --tensor 2", "--tensor says nothing here"),
    ("stress --testbed --faults kill --lease-s 8", "--lease-s says nothing here"),
    ("stress --testbed --partitions --max-bytes 1M", "--max-bytes says nothing here"),
    (f"{BENCH} --nproc-per-node 2", "--nproc-per-node says nothing here"),
    (f"{BENCH} --sizes 8 --end 1M", "--end says nothing here"),
    ("stress --testbed --faults nosuchfault", "nosuchfault"),
    ("stress --testbed --faults kill --save {unwritable}/s", "below: Not a directory"),
    ("demo --out {unwritable}/demo", "demo"),
    ("demo --out {binary}", "binary.yaml: File exists; name a folder of yours"),
    ("demo --plan {folder}/nowhere.yaml", "nowhere.yaml"),
    ("demo --testbed nosuchspec", "nosuchspec"),
    ("demo --device nosuchdevice", "nosuchdevice"),
    ("demo --testbed pair", "--testbed pair has 2 nodes; the demo is made for 4"),
    ("demo --ethernet eth9", "--ethernet eth9: node a0"),
    ("demo --backend mpi", "--backend mpi is none that this torch has"),
    ("store --port 99999", "--port"),
    ("store --listen 192.0.2.7:29400", "give --listen 192.0.2.7 --port 29400"),
]


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Files that are right, and files that are not."""
    folder = tmp_path_factory.mktemp("wrong")
    places = {"folder": folder} | {
        name: folder / f"{name}.yaml"
        for name in (
            "topology",
            "larger",
            "plan",
            "unfit",
            "rates",
            "binary",
            "empty",
            "twice",
            "many",
            "words",
            "bare",
            "endless",
            "none",
            "lossy",
        )
    }
    places["unwritable"] = folder / "a-file" / "below"  # whoever runs the tests, root too
    (folder / "a-file").write_text("")
    small = topology_of([[2, 2], [2, 2]])
    small.save(places["topology"])
    topology_of([[8, 8], [8, 8]]).save(places["larger"])
    plan = plan_for(small, model_layers=30, pipeline=2, micro_batch=1, global_batch=8, model=SIZES)
    plan.save(places["plan"])
    data = plan.to_dict() | {"layers_per_chunk": [[26], [5]]}
    places["unfit"].write_text(json.dumps(data))
    places["rates"].write_text(
        "kind: holmes rates\nversion: 1\ncompute_tflops: 100\nlinks:\n"
        + "".join(f"  {name}: {{gbps: 100}}\n" for name in ("infiniband", "roce_v2", "ethernet"))
    )
    places["binary"].write_bytes(bytes(range(256)))
    places["twice"].write_text("clusters: {a: {nodes: 1, nodes: 2}}\n")
    (folder / "json").mkdir()
    (folder / "json" / "twice.json").write_text('{"kind": "holmes plan", "kind": "other"}')
    places["empty"].write_text("")
    places["lossy"].write_text("networks: {eth: {class: ethernet, loss_percent: 200}}\nclusters: {}\n")
    places["words"].write_text("groups: {dp: 7}\n")
    places["bare"].write_text("groups: {dp: [0, 8]}\n")
    places["endless"].write_text("groups: {dp: [0-9999999999]}\n")
    places["none"].write_text("groups: {}\n")
    host = {"name": "h{}", "count": 100_000_000_000, "ranks_per_host": 8, "ports": []}
    places["many"].write_text(json.dumps({"kind": "holmes topology", "version": 2, "hosts": [host]}))
    return places


def answer(line: str, capfd: pytest.CaptureFixture[str]) -> tuple[object, str]:
    """The exit code and standard error of `holmes` with this command line."""
    with pytest.raises(SystemExit) as ended:
        main(line.split())
    return ended.value.code, capfd.readouterr().err


@pytest.mark.parametrize(("line", "words"), WRONG, ids=[line for line, _ in WRONG])
def test_a_wrong_input_is_answered_with_one_sentence(
    line: str, words: str, places: dict[str, Path], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(places["folder"])
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    code, said = answer(line.format(**places), capfd)
    assert code == 2, said
    assert len(said.splitlines()) == 1, said
    assert said.startswith("holmes"), said
    assert words in said


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("HOLMES_TLSS", ["HOLMES_TLSS means nothing to Holmes; is HOLMES_TLS meant?"]),
        (
            "HOLMES_CONNECT_TIMEOUT",
            ["HOLMES_CONNECT_TIMEOUT means nothing to Holmes; is HOLMES_CONNECT_TIMEOUT_S meant?"],
        ),
        ("HOLMES_LOG_LEVEL", ["HOLMES_LOG_LEVEL means nothing to Holmes; is HOLMES_LOG meant?"]),
        ("HOLMES_IB_HCA", ["HOLMES_IB_HCA means nothing to Holmes; is HOLMES_NICS meant?"]),
        ("HOLMES_SOCKET_IFNAME", ["HOLMES_SOCKET_IFNAME means nothing to Holmes; is HOLMES_NICS meant?"]),
        ("HOLMES_SHM", []),
        ("HOLMES_TEST_RDMA", []),  # of the tests
    ],
)
def test_a_variable_that_is_nearly_one_is_told_once(name: str, told: list[str]) -> None:
    program = "import holmes_comm as h; [h.init(h.LocalStore(), 0, 1) for _ in range(2)]"
    ended = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, name: "1"}, capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == 0, ended.stderr
    lines = [line for line in ended.stderr.splitlines() if name in line]
    assert len(lines) == len(told)
    assert all(words in line for words, line in zip(told, lines, strict=True))


@pytest.mark.parametrize("command", ["doctor", "topology", "stress"])
def test_a_rank_outside_its_job_is_told_so(
    command: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = {"RANK": "5", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    monkeypatch.setattr(os, "environ", dict(os.environ) | environment)
    code, said = answer(command, capfd)
    assert code == 2
    assert said == f"holmes {command}: RANK=5 is none of WORLD_SIZE=2's ranks, 0 to 1; start the job with torchrun\n"
