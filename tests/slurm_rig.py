"""A real Slurm on loopback for tests: munged, one slurmctld and some slurmd, without systemd, in a folder of its own.

Owns configuration, start and end of the daemons, and how tests ask and submit. Must not know Eelgrid beyond its
job_submit plugin. Nodes have GPUs that are files: as many as the GRES says. Every daemon is ended by its own process id.
With a database there is a slurmdbd as well, and the MariaDB in which it keeps what jobs used.

Debian's Slurm asks under which name it runs: daemons are started by links named slurmctld and slurmd, or all GRES would be
lost without a word.
"""

import contextlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path

from tests.e2e.processes import free_port
from tests.waiting import poll_until

_DAEMONS = ("slurmctld", "slurmd", "slurmstepd")
_DATABASE_PROGRAMS = ("slurmdbd", "mariadbd", "mariadb-install-db", "sacctmgr")
_START_S = 60.0
_SHOWN_LINES = 40
_PLUGIN = Path(__file__).parent.parent / "deploy" / "slurm" / "job_submit.lua"
_LEASE = 'os.getenv("EELGRID_SLURM_LEASE") or "/run/eelgrid/slurm-lease"'
CPUS, MEMORY_MIB, GPUS = 16, 64_000, 4


def find_missing(*, database=False):
    """Returns what is not installed of a Slurm that can be started here; empty if nothing is."""
    programs = ("munged", "squeue", "sbatch", "scontrol", *(_DATABASE_PROGRAMS if database else ()))
    missing = [name for name in programs if not (shutil.which(name) or Path("/usr/sbin", name).exists())]
    missing += [name for name in _DAEMONS[:2] if _find_daemon(name) is None]
    if os.geteuid():
        missing.append("root, as whom its daemons start")
    return ", ".join(missing)


def _find_daemon(name):
    paths = (Path("/usr/sbin", name + "-wlm"), Path("/usr/sbin", name))
    return next((path for path in paths if path.exists()), None)


def write_handover(folder):
    """Writes a prolog and an epilog that hand jobs over in a folder of it; returns that, and the lines of slurm.conf for them."""
    jobs = folder / "jobs"
    jobs.mkdir(mode=0o700)
    lines = ["PrologFlags=Alloc"]
    for name in ("prolog", "epilog"):
        path = folder / name
        path.write_text(f"#!/bin/sh\nEELGRID_SLURM_FOLDER={jobs} exec {_PLUGIN.parent / name}\n")
        path.chmod(0o755)
        lines.append(f"{name.title()}={path}")
    return jobs, "\n".join(lines)


def find_cgroups():
    """Returns the folder of a hierarchy of version 1 in which this user may make cgroups for processes; None without one."""
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, folder, kind, options, *_ = line.split()
        if kind == "cgroup" and "freezer" in options.split(",") and os.access(folder, os.W_OK):
            return Path(folder).parent
    return None


class SlurmCluster:
    """One cluster, in a new folder; `types` are the GRES types of its nodes n0, n1, and so on.

    With `cgroups` each step is in a cgroup of its own, in the folder of that hierarchy of version 1 (`find_cgroups`).
    """

    def __init__(self, *, types=("a100", "a100", "h100"), lease=None, extra="", database=False, cgroups=None):
        # Steps listen at SPOOL/NODE_JOB.STEP, and a path of more than 107 bytes is no socket: then launches fail and jobs are
        # requeued and held. pytest's own folders are too long for that.
        self.folder = folder = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))
        self.types = types
        self.names = [f"n{number}" for number in range(len(types))]
        self.lease = lease or folder / "lease"
        for name in ("bin", "etc", "state", "log", "run", "dev", "munge"):
            (folder / name).mkdir(parents=True, exist_ok=True)
        # munged and slurmd refuse folders that others may write to.
        for path in (folder, *folder.parents):
            if path.stat().st_uid == os.geteuid() and path != Path("/tmp"):
                with contextlib.suppress(PermissionError):
                    path.chmod(0o755)
        (folder / "munge").chmod(0o711)
        for name in _DAEMONS:
            link = folder / "bin" / name
            if not link.is_symlink() and (found := _find_daemon(name)) is not None:
                link.symlink_to(found)
        self._cgroups = cgroups
        self.database, self._mariadb = folder / "database" if database else None, None
        self.conf = folder / "etc" / "slurm.conf"
        self.environment = {**os.environ, "SLURM_CONF": str(self.conf)}
        self._write_configuration(f"{extra}\n{self._write_database_configuration()}" if database else extra)

    def _write_configuration(self, extra):
        folder, port = self.folder, free_port()
        ports = [free_port() for _ in self.names]
        gres = ["AutoDetect=off"]
        nodes = []
        for number, (name, kind) in enumerate(zip(self.names, self.types, strict=True)):
            for index in range(GPUS):
                device = folder / "dev" / f"nvidia{index}"
                if not device.is_symlink():
                    device.symlink_to("/dev/null")  # a device file, as Slurm demands
            gres.append(f"NodeName={name} Name=gpu Type={kind} File={folder}/dev/nvidia[0-{GPUS - 1}]")
            nodes.append(
                f"NodeName={name} NodeHostname=localhost NodeAddr=127.0.0.1 Port={ports[number]} CPUs={CPUS} "
                f"RealMemory={MEMORY_MIB} Gres=gpu:{kind}:{GPUS} Feature={kind},rack{number % 2} State=UNKNOWN"
            )
        # Tests beside each other have their own: an agent looks for the processes of a job by its number.
        first_job = random.SystemRandom().randrange(1, 60_000) * 1000
        settings = f"""
            ClusterName=tests
            SlurmctldHost=localhost(127.0.0.1)
            SlurmctldPort={port}
            SlurmUser=root
            SlurmdUser=root
            AuthType=auth/munge
            AuthInfo=socket={folder}/munge/socket,cred_expire=60
            CredType=cred/munge
            CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
            StateSaveLocation={folder}/state
            SlurmdSpoolDir={folder}/state/slurmd.%n
            SlurmctldPidFile={folder}/run/slurmctld.pid
            SlurmdPidFile={folder}/run/slurmd.%n.pid
            SlurmctldLogFile={folder}/log/slurmctld.log
            SlurmdLogFile={folder}/log/slurmd.%n.log
            MpiDefault=none
            ProctrackType=proctrack/{"linuxproc" if self._cgroups is None else "cgroup"}
            TaskPlugin=task/none
            SwitchType=switch/none
            JobAcctGatherType=jobacct_gather/none
            AccountingStorageType=accounting_storage/{"slurmdbd" if self.database else "none"}
            JobCompType=jobcomp/filetxt
            JobCompLoc={folder}/log/jobcomp.txt
            SelectType=select/cons_tres
            SelectTypeParameters=CR_CPU_Memory
            SchedulerType=sched/backfill
            SchedulerParameters=bf_interval=1,sched_interval=1,sched_min_interval=0,batch_sched_delay=0
            PriorityType=priority/basic
            JobRequeue=1
            ReturnToService=2
            SlurmdParameters=config_overrides
            SlurmdTimeout=300
            MinJobAge=300
            FirstJobId={first_job}
            KillWait=2
            BatchStartTimeout=120
            MessageTimeout=60
            DefMemPerCPU=100
            GresTypes=gpu
            JobSubmitPlugins=lua
            PartitionName=main Nodes=n[0-{len(self.names) - 1}] Default=YES MaxTime=INFINITE State=UP
        """
        lines = [line.strip() for line in settings.splitlines()]
        self.conf.write_text("\n".join([*lines, *nodes, extra, ""]))
        (folder / "etc" / "gres.conf").write_text("\n".join(gres) + "\n")
        lines = ["ConstrainDevices=no", "CgroupAutomount=no"]
        if self._cgroups is not None:
            lines += ["CgroupPlugin=cgroup/v1", f"CgroupMountpoint={self._cgroups}"]
        (folder / "etc" / "cgroup.conf").write_text("\n".join([*lines, ""]))
        plugin = _PLUGIN.read_text()
        assert _LEASE in plugin
        (folder / "etc" / "job_submit.lua").write_text(plugin.replace(_LEASE, f'"{self.lease}"'))

    def _write_database_configuration(self):
        """Writes what slurmdbd and MariaDB read; returns the lines of slurm.conf that name them."""
        folder, port = self.folder, free_port()
        self.database_port = free_port()
        settings = f"""
            AuthType=auth/munge
            AuthInfo=socket={folder}/munge/socket
            DbdHost=localhost
            DbdAddr=127.0.0.1
            DbdPort={port}
            SlurmUser=root
            StorageType=accounting_storage/mysql
            StorageHost=127.0.0.1
            StoragePort={self.database_port}
            StorageUser=slurm
            StoragePass=slurm
            StorageLoc=slurm
            CommitDelay=1
            LogFile={folder}/log/slurmdbd.log
            PidFile={folder}/run/slurmdbd.pid
        """
        path = folder / "etc" / "slurmdbd.conf"
        path.write_text("\n".join([*(line.strip() for line in settings.splitlines()), ""]))
        path.chmod(0o600)  # else slurmdbd refuses it
        settings = {"Host": "127.0.0.1", "Port": port, "Pass": folder / "munge" / "socket", "TRES": "gres/gpu"}
        return "\n".join(f"AccountingStorage{name}={value}" for name, value in settings.items())

    def _start_database(self):
        """Starts MariaDB and slurmdbd, and has it know the cluster."""
        (self.folder / "database.sql").write_text(
            "CREATE DATABASE IF NOT EXISTS slurm;\n"
            "CREATE USER IF NOT EXISTS slurm@'127.0.0.1' IDENTIFIED BY 'slurm';\n"
            "GRANT ALL ON slurm.* TO slurm@'127.0.0.1';\n"
        )
        if not self.database.exists():
            self._start(
                "mariadb-install-db", "--no-defaults", f"--datadir={self.database}", "--user=root", "--skip-test-db",
                "--skip-name-resolve", "--innodb-log-file-size=8M",
            )  # fmt: skip
        mariadb = [
            "/usr/sbin/mariadbd", "--no-defaults", f"--datadir={self.database}", "--user=root", "--bind-address=127.0.0.1",
            f"--port={self.database_port}", f"--socket={self.folder}/run/mariadb.socket",
            f"--pid-file={self.folder}/run/mariadb.pid", f"--log-error={self.folder}/log/mariadb.log",
            f"--init-file={self.folder}/database.sql", "--skip-name-resolve", "--innodb-buffer-pool-size=32M",
            "--innodb-log-file-size=8M", "--innodb-lock-wait-timeout=900", "--performance-schema=off",
        ]  # fmt: skip
        self._mariadb = subprocess.Popen(mariadb, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        poll_until((self.folder / "run" / "mariadb.pid").exists, "MariaDB answers", within_s=_START_S)
        self._start("/usr/sbin/slurmdbd")
        poll_until(self._is_known_to_database, "slurmdbd knows the cluster", within_s=_START_S)

    def _is_known_to_database(self):
        with contextlib.suppress(AssertionError):
            self.run("sacctmgr", "-i", "add", "cluster", "tests")
        with contextlib.suppress(AssertionError):
            return "tests" in self.run("sacctmgr", "-nP", "list", "cluster", "format=cluster")
        return False

    def __enter__(self):
        try:
            self.start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *reason):
        self.stop()
        # pytest shows it with a test that failed.
        for path in sorted((self.folder / "log").glob("slurm*.log")):
            print(path.name, *path.read_text(errors="replace").splitlines()[-_SHOWN_LINES:], sep="\n  ")
        shutil.rmtree(self.folder, ignore_errors=True)

    def start(self):
        """Starts all daemons; returns when every node is idle."""
        munge = self.folder / "munge"
        if not (munge / "key").exists():
            (munge / "key").write_bytes(os.urandom(1024))
            (munge / "key").chmod(0o400)
        names = {"key-file": "key", "socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
        self._start("munged", "--force", *(f"--{option}={munge / name}" for option, name in names.items()))
        if self.database is not None:
            self._start_database()
        self.start_controller()
        for name in self.names:
            self.start_node(name)
        poll_until(
            lambda: self.run("sinfo", "-h", "-N", "-t", "idle", "-o", "%N").split() == self.names,
            "all nodes are idle",
            within_s=_START_S,
        )

    def start_controller(self):
        """Starts slurmctld."""
        self._start(str(self.folder / "bin" / "slurmctld"))

    def start_node(self, name, *options):
        """Starts the slurmd of a node; with -b as after a boot, which a node that was powered up must show."""
        step = str(self.folder / "bin" / "slurmstepd")
        self._start(str(self.folder / "bin" / "slurmd"), *options, "-d", step, "-N", name)

    def _start(self, *command):
        done = subprocess.run(
            command, check=False, env=self.environment, capture_output=True, text=True, timeout=_START_S
        )
        assert done.returncode == 0, f"{command[0]}: {done.stderr}"

    def kill(self, daemon, number=9):
        """Sends a signal to slurmctld or to slurmd.NAME, and waits until it is gone."""
        _end(number, self.folder / "run" / f"{daemon}.pid")
        if daemon == "slurmctld" and number == signal.SIGKILL:
            # It may have forgotten jobs, whose numbers it would give again, and with them the files of their output.
            text = self.conf.read_text()
            first = int(re.search(r"FirstJobId=(\d+)", text)[1])
            self.conf.write_text(text.replace(f"FirstJobId={first}", f"FirstJobId={first + 200}"))

    def stop(self):
        """Ends all jobs and daemons."""
        with contextlib.suppress(AssertionError, subprocess.TimeoutExpired):
            self.end_jobs(within_s=10.0)
        _end(15, *(self.folder / "run").glob("slurm*.pid"))
        if self._mariadb is not None:
            self._mariadb.terminate()
            self._mariadb.wait(30.0)
        _end(15, self.folder / "munge" / "pid")

    def end_jobs(self, *, within_s):
        """Ends all jobs; returns when none holds a node."""
        self.run("scancel", "--user=root")
        held = ("squeue", "-h", "-t", "running,completing")
        poll_until(lambda: not self.run(*held).strip(), "all jobs have ended", within_s=within_s)

    def run(self, *command, code=0):
        """Runs one of Slurm's commands; returns what it printed."""
        done = subprocess.run(
            command, check=False, env=self.environment, capture_output=True, text=True, timeout=30, cwd=self.folder
        )
        assert done.returncode == code, f"{command}: {done.returncode} {done.stderr}"
        return done.stdout

    def submit(self, script, *options, steered=True):
        """Submits a script; returns the number of the job."""
        comment = ("--comment=eelgrid",) if steered else ()
        output = (f"--output={self.folder}/log/job-%j.txt", "--open-mode=append")
        return self.run("sbatch", "--parsable", *comment, *output, *options, f"--wrap={script}").strip()

    def wait_saved(self):
        """Waits until slurmctld has written all that holds now to disk: the second time from now, as it may just be writing."""
        path = self.folder / "state" / "job_state"
        for _ in range(2):
            before_s = path.stat().st_mtime if path.exists() else 0.0
            # It writes what has changed.
            self.run("scancel", self.submit("true", "--hold", steered=False))
            poll_until(
                lambda before_s=before_s: path.exists() and path.stat().st_mtime > before_s,
                "slurmctld has saved its jobs",
                within_s=60.0,
            )

    def forget_ended(self):
        """Has slurmctld forget every job that has ended, as it does after MinJobAge."""
        text = self.conf.read_text()
        self.conf.write_text(text.replace("MinJobAge=300", "MinJobAge=2"))
        self.run("scontrol", "reconfigure")
        poll_until(lambda: not self.jobs(), "slurmctld has forgotten its jobs", within_s=120.0)

    def jobs(self):
        """All jobs as squeue's JSON has them, by number."""
        return {str(job["job_id"]): job for job in json.loads(self.run("squeue", "--json"))["jobs"]}

    def output(self, job):
        """What a job that `submit` submitted has written; of all its runs, since a restart appends."""
        path = self.folder / "log" / f"job-{job}.txt"
        return path.read_text(errors="replace") if path.exists() else ""

    def state(self, job):
        """The state of a job."""
        return self.jobs()[job]["job_state"]

    def devices(self):
        """By scontrol alone: the GPUs that running jobs hold, as pairs of a node and an index, each with its jobs."""
        held = {}
        for block in self.run("scontrol", "show", "job", "-d").split("\n\n"):
            lines = [dict(part.split("=", 1) for part in line.split() if "=" in part) for line in block.splitlines()]
            job = next((line["JobId"] for line in lines if "JobId" in line), "")
            if not any(line.get("JobState") == "RUNNING" for line in lines):
                continue
            for fields in lines:
                if "IDX" not in fields.get("GRES", ""):
                    continue
                names = self.run("scontrol", "show", "hostnames", fields["Nodes"]).split()
                indexes = fields["GRES"].partition("IDX:")[2].rstrip(")")
                for part in indexes.split(","):
                    first, _, last = part.partition("-")
                    for index in range(int(first), int(last or first) + 1):
                        for name in names:
                            held.setdefault((name, index), []).append(job)
        return held


def _end(number, *paths):
    """Sends a signal to the processes of some files, and waits until they are gone."""
    pids = []
    for path in paths:
        with contextlib.suppress(OSError, ValueError):
            pids.append(int(path.read_text()))
            os.kill(pids[-1], number)
    poll_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), "they have ended", within_s=30.0)
    for path in paths:
        path.unlink(missing_ok=True)
