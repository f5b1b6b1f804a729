"""A real SLURM cluster on one machine: slurmctld on the host `ctl`, slurmd on node1, node2 and so on.

Only the nodes are emulated. The switch between them is a bridge in the network of `ctl`. Sockets and spool are in the
/run of each host and all other files in one folder, so a cluster does not disturb another one, or a SLURM that the
machine belongs to.
"""

import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

from tests.cluster import namespaces
from tests.cluster.namespaces import PATH, Host
from tests.helpers.limits import PATIENCE

# ProctrackType, TaskPlugin and JobAcctGatherType are chosen so that SLURM needs neither systemd nor usable cgroups.
# A requeued job waits for cred_expire, by default two minutes.
# config_overrides: a node may have more CPUs and memory than the machine.
_SLURM_CONF = """\
ClusterName=test
SlurmctldHost=ctl
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=cred_expire=5
CredType=cred/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
StateSaveLocation={folder}/state
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd.pid
SlurmdSpoolDir=/run/slurmd
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,sched_interval=1,sched_min_interval=0
ReturnToService=2
SlurmdTimeout=120
BatchStartTimeout=120
KillWait={kill_wait}
MinJobAge=3600
JobRequeue=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
NodeName=node[1-{num_nodes}] CPUs=4 RealMemory=1000000 State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES PriorityTier=1 PreemptMode=REQUEUE GraceTime=120
PartitionName=high Nodes=ALL PriorityTier=10 PreemptMode=OFF
"""


def why_not() -> str:
    """The reason why this machine cannot run a cluster, or an empty string."""
    commands = ("slurmctld", "slurmd", "sbatch", "munged")
    missing = [command for command in commands if not shutil.which(command, path=PATH)]
    if missing:
        return f"a cluster needs {', '.join(missing)} (packages slurmctld, slurmd, slurm-client, munge)"
    return namespaces.why_not()


class Slurm:
    """A cluster of nodes with 4 CPUs each. Jobs in partition `high` pre-empt those in `main`, the default."""

    def __init__(self, folder: Path, num_nodes: int = 2, kill_wait_seconds: int = 120):
        self.folder = folder.resolve()
        self.nodes = [f"node{i + 1}" for i in range(num_nodes)]
        self._kill_wait_seconds = kill_wait_seconds
        self._environment = {"PATH": PATH, "HOME": str(self.folder), "SLURM_CONF": str(self.folder / "slurm.conf")}

    def __enter__(self) -> "Slurm":
        self._configure()
        addresses = {"ctl": "10.77.0.254"} | {node: f"10.77.0.{i + 1}" for i, node in enumerate(self.nodes)}
        with ExitStack() as stack:
            self.hosts = {name: stack.enter_context(Host(name, addresses)) for name in addresses}
            ctl = self.hosts["ctl"]
            ctl.ip("link", "add", "bridge", "type", "bridge")
            ctl.set_address("bridge")
            for node in self.nodes:
                ctl.connect(node, self.hosts[node])
                ctl.ip("link", "set", node, "master", "bridge")
            for name, host in self.hosts.items():
                self._start_daemons(host, "slurmctld" if name == "ctl" else "slurmd")
            self._wait_for_nodes()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error) -> None:
        self._stack.close()

    def _configure(self) -> None:
        (self.folder / "state").mkdir(parents=True)
        text = _SLURM_CONF.format(folder=self.folder, num_nodes=len(self.nodes), kill_wait=self._kill_wait_seconds)
        (self.folder / "slurm.conf").write_text(text)
        # slurmd loads a cgroup plugin even if nothing uses it. With its default plugin, slurmd exits where cgroups are
        # absent, hybrid, or v2 without systemd. cgroup/v1 does nothing until used; 24.05 and later need no plugin.
        version = subprocess.check_output(["slurmd", "-V"], env={"PATH": PATH}, text=True)
        year, month = (int(part) for part in re.findall(r"\d+", version)[:2])
        plugin = "disabled" if (year, month) >= (24, 5) else "cgroup/v1"
        (self.folder / "cgroup.conf").write_text(f"CgroupPlugin={plugin}\n")
        (self.folder / "munge.key").touch(mode=0o600)
        (self.folder / "munge.key").write_bytes(os.urandom(128))

    def _start_daemons(self, host: Host, slurm_daemon: str) -> None:
        munge = ["munged", "--force", "--num-threads=1"]
        munge += [f"--key-file={self.folder}/munge.key", "--seed-file=/run/munge/seed", "--log-file=/run/munge/log"]
        for command in (["mkdir", "-m", "755", "/run/munge"], munge, [slurm_daemon]):
            self._checked(self.on(host.name, *command))

    def _wait_for_nodes(self) -> None:
        deadline = time.monotonic() + PATIENCE
        idle = ["sinfo", "--noheader", "--Node", "--responding", "--states=idle", "--partition=main", "--format=%N"]
        while set(self.run(*idle).stdout.split()) != set(self.nodes):
            if time.monotonic() > deadline:
                logs = [log.read_text() for log in sorted(self.folder.glob("*.log"))]
                raise AssertionError(
                    "\n".join([f"not all nodes are idle after {PATIENCE:g} s", self.run("sinfo").stdout, *logs])
                )
            time.sleep(0.05)

    def on(
        self, host: str, *command: str, env: Mapping[str, str] | None = None, cwd: Path | None = None, **options
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on a node or `ctl`. `env` is added to a minimal environment, not to the caller's."""
        environment = {**self._environment, **(env or {})}
        return self.hosts[host].run(*command, env=environment, cwd=cwd or self.folder, **options)

    def run(self, *command: str, **options) -> subprocess.CompletedProcess[str]:
        """Run a command on `ctl`, where users submit jobs."""
        return self.on("ctl", *command, **options)

    @staticmethod
    def _checked(done: subprocess.CompletedProcess[str]) -> str:
        assert done.returncode == 0, f"{' '.join(done.args)}: exit code {done.returncode}\n{done.stdout}{done.stderr}"
        return done.stdout

    def sbatch(self, *arguments: str, env: Mapping[str, str] | None = None, cwd: Path | None = None) -> str:
        """Submit a job; returns its id. The job inherits `env` and `cwd` from sbatch unless it sets its own."""
        return self._checked(self.run("sbatch", "--parsable", *arguments, env=env, cwd=cwd)).strip()

    def scontrol(self, *arguments: str) -> str:
        """Run scontrol, again after SIGPIPE: on a busy machine, munged closes a connection that is silent for 2 s."""
        for _ in range(10):
            if (done := self.run("scontrol", *arguments)).returncode != -signal.SIGPIPE:
                break
        return self._checked(done)

    def scancel(self, job: str, *arguments: str) -> None:
        self._checked(self.run("scancel", *arguments, job))

    def show(self, job: str) -> dict[str, str]:
        """The fields of `scontrol show job`: JobState, Reason, Restarts, ExitCode, NodeList and many more."""
        fields = re.split(r"\s(?=[A-Z][\w/:]*=)", self.scontrol("show", "job", "-o", job).strip())
        return dict(field.split("=", 1) for field in fields)

    def state(self, job: str) -> str:
        return self.show(job)["JobState"]

    def wait(self, job: str, *states: str, timeout: float = PATIENCE) -> str:
        """Poll the job every 0.2 s until it is in one of these states; returns that state."""
        deadline = time.monotonic() + timeout
        while (state := self.state(job)) not in states:
            if time.monotonic() > deadline:
                queue = self.run("squeue", "--long").stdout
                raise AssertionError(f"job {job} is {state} after {timeout:g} s, not {' or '.join(states)}\n{queue}")
            time.sleep(0.2)
        return state
