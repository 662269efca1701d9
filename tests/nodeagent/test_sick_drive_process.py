"""An agent's process with a drive that falls ill in every way that a kernel can be made to show here, and gets well.

One agent goes through all of it: its first drive is a tiny ext4 file system of its own, the second one stays well. In
each case engines are served all the while, what was on the other drive is found, and where the cause is gone the first
drive is read and written again. What an operator sees meanwhile:

| cause, made by | `/status`: the drive, `failure` | metric, beside `drive_up` | the log |
|---|---|---|---|
| ENOSPC: others fill the disk | `chunks` fall, or `is_write_paused` | evictions, or `nvme_write_failed` | refuses |
| EROFS: `mount -o remount,ro` | `is_write_paused` | `nvme_write_failed` | refuses |
| EIO: the image is cut short | not `is_up`, can't be read | `nvme_quarantined` | put into quarantine|
| EMFILE: `RLIMIT_NOFILE` | `is_up`, and no chunk goes | `nvme_read_failed` | and stays |
| a file that can't be removed: `chattr +i` | its bytes stay counted | `nvme_unremovable` | can't be removed |
| the folder is gone: it is moved away | not `is_up`, gone | `nvme_quarantined` | put into quarantine|
| the drive hangs: `fsfreeze` | not `is_up`, hangs | `nvme_quarantined` | put into quarantine|

Metrics are reasons of `warmroute_degraded_total`; `warmroute_nvme_drive_up` is 0 where `is_up` is false.
Kernels of tests have no device mapper: a device's errors come from its image, and its silence from a freeze.
"""

import itertools
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import urllib.request

import pytest

from nodeagent.client import PutResult
from nodeagent.tiers.chunk_file import file_bytes, name_of
from tests.free_port import free_port
from tests.nodeagent.mounts import command, image_mounted
from tests.nodeagent.running import CHUNK_BYTES, SLOTS, WAIT_S, connected, eventually, label, payload, storage_key

IMAGE_BYTES = 12 << 20
QUOTA_BYTES = 8 << 20

AGENT = """
import sys
from nodeagent.tiers import drive, file_writer, quarantine, room
from warmroute.cli import main
drive.Drive.__init__.__kwdefaults__["write_pause_s"] = 0.3
quarantine.RETRY_FIRST_S = quarantine.RETRY_MAX_S = quarantine.WATCH_S = 0.1
quarantine.HANG_S = 0.5
room.LOOK_S = file_writer.LOOK_S = 0.1
sys.exit(main(["agent", "--config", sys.argv[1]]))
"""


class Host:
    """The agent's process, an engine at its door, and what an operator can see of it."""

    def __init__(self, folder, image):
        self.folder, self.image = folder, image
        self.numbers = itertools.count()
        self.port = free_port()
        drives = [{"path": str(folder / f"drive-{n}"), "gb": QUOTA_BYTES / 1e9} for n in range(2)]
        config = {
            "host": "h",
            "door": str(folder / "door.sock"),
            "listen": {"port": self.port},
            "directory": {"url": "redis://127.0.0.1:1"},
            "dram": {"gb": (4_096 + SLOTS * CHUNK_BYTES) / 1e9},
            "nvme": {"paths": drives, "write": "through"},
        }
        (folder / "agent.yaml").write_text(json.dumps(config))
        self.log = folder / "log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen([sys.executable, "-c", AGENT, str(folder / "agent.yaml")], stderr=log)

    def get(self, path):
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=WAIT_S) as answer:
            return answer.read().decode()

    def drive(self, number=0):
        return json.loads(self.get("/status"))["tiers"]["nvme"]["drives"][number]

    def metric(self, name, **labels):
        wanted = ",".join(f'{key}="{value}"' for key, value in sorted(labels.items()))
        found = re.search(rf"^warmroute_{name}{{{wanted}}} (\S+)$", self.get("/metrics"), re.MULTILINE)
        return float(found.group(1)) if found else 0.0

    def has_said(self, words, since):
        return words in self.log.read_text()[since:]

    def place(self, number, name):
        text = name_of(storage_key(name)).hex()
        return self.folder / f"drive-{number}" / text[:2] / text[2:4] / text

    def put_one(self):
        """A chunk that is new, in DRAM; on a drive soon, if it may be."""
        name = f"n{next(self.numbers)}"
        assert self.client.put(label(name), payload(name), WAIT_S) is PutResult.STORED
        return name

    def write_on(self, number, count=1):
        """Chunks whose files are on this drive."""
        written = []

        def is_written():
            name = self.put_one()
            eventually(lambda: not json.loads(self.get("/status"))["tiers"]["nvme"]["queued_writes"], "the write")
            written.extend([name] if self.place(number, name).exists() else [])
            return len(written) >= count

        eventually(is_written, f"files on drive {number}", 2 * WAIT_S)
        return written

    def forget_in_dram(self):
        for _ in range(SLOTS + 1):
            self.put_one()

    def read(self, name, wait_s=1.0):
        """The chunk's bytes are right, or it is a miss."""
        chunks = self.client.open([storage_key(name)], wait_s)
        if not chunks:
            return False
        target = bytearray(CHUNK_BYTES)
        try:
            assert self.client.read_into(chunks[0], memoryview(target))
            assert target == payload(name)
            return chunks[0].tier
        finally:
            self.client.close(chunks)

    def check_served(self, on_the_other):
        """The agent lives: DRAM takes and gives, and the other drive is read."""
        assert self.process.poll() is None
        name = self.put_one()
        assert self.read(name) == "dram"
        self.forget_in_dram()
        eventually(lambda: self.read(on_the_other), "a hit on the other drive")

    def check_recovered(self, kept=None):
        """The first drive is read and written again."""
        eventually(lambda: self.drive()["is_up"] and not self.drive()["is_restoring"], "the drive's return")
        eventually(lambda: not self.drive()["is_write_paused"], "the end of the pause")
        assert self.metric("nvme_drive_up", drive=str(self.folder / "drive-0")) == 1
        [name] = self.write_on(0)
        self.forget_in_dram()
        eventually(lambda: self.read(name), "a hit on what was written now")
        if kept is not None:
            eventually(lambda: self.read(kept), "a hit on what was written before")


@pytest.fixture(scope="module")
def host(tmp_path_factory):
    folder = tmp_path_factory.mktemp("host")
    with image_mounted(folder / "drive-0", IMAGE_BYTES) as image:
        host = Host(folder, image)
        try:
            eventually((folder / "door.sock").exists, "the door", 2 * WAIT_S)
            with connected(str(folder / "door.sock")) as client:
                host.client = client
                yield host
        finally:
            command("fsfreeze", "-u", str(image))
            host.process.kill()
            host.process.wait(WAIT_S)


def begin(host):
    """What is there before the fault: files on both drives, and where the log ends."""
    host.check_recovered()
    [other] = host.write_on(1)
    mine = host.write_on(0, 6)
    host.forget_in_dram()
    return mine, other, len(host.log.read_text())


def uncounted(drive):
    """Bytes of files that nobody finds."""
    return drive["bytes_used"] - drive["chunks"] * file_bytes(CHUNK_BYTES)


def failed(host, reason):
    return host.metric("degraded_total", reason=reason)


def test_a_full_disk_is_read_and_written_again_when_there_is_room(host):
    _, other, since = begin(host)
    before, chunks = failed(host, "nvme_write_failed"), host.drive()["chunks"]
    evicted = host.metric("evictions_total", tier="nvme", reason="quota")
    space = os.statvfs(host.image)
    (host.image / "ballast").write_bytes(bytes(space.f_bavail * space.f_frsize - 1_024))
    # Room is made before a write meets the full disk, unless it comes first.
    eventually(
        lambda: host.put_one() and (failed(host, "nvme_write_failed") > before or host.drive()["chunks"] < chunks),
        "a drive that gives way",
    )
    if failed(host, "nvme_write_failed") > before:
        assert host.has_said("refuses to be written", since)
    else:
        eventually(lambda: host.metric("evictions_total", tier="nvme", reason="quota") > evicted, "the evictions")
    host.check_served(other)
    (host.image / "ballast").unlink()
    host.check_recovered()


def test_a_disk_that_turned_read_only_is_read_and_written_again_when_it_may_be(host):
    mine, other, since = begin(host)
    before = failed(host, "nvme_write_failed")
    assert command("mount", "-o", "remount,ro", str(host.image))
    eventually(lambda: host.put_one() and failed(host, "nvme_write_failed") > before, "a refused write")
    eventually(lambda: host.put_one() and host.drive()["is_write_paused"], "the pause")
    assert host.drive()["is_up"]
    assert host.has_said("refuses to be written", since)
    host.check_served(other)
    eventually(lambda: host.read(mine[0]), "a hit on the drive that can't be written")
    assert command("mount", "-o", "remount,rw", str(host.image))
    host.check_recovered(mine[1])


def test_a_disk_with_io_errors_is_left_and_taken_back_when_it_answers(host):
    mine, other, since = begin(host)
    backing = host.image.with_suffix(".img")
    assert command("sync", "-f", str(host.image))
    shutil.copyfile(backing, backing.with_suffix(".saved"))
    os.truncate(backing, 0)
    before = failed(host, "nvme_quarantined")
    for name in mine[:4]:
        assert not host.read(name)
    eventually(lambda: failed(host, "nvme_quarantined") > before, "the quarantine")
    assert host.has_said("is put into quarantine (it can't be read", since)
    with backing.with_suffix(".saved").open("rb") as saved, backing.open("r+b") as file:
        # What the agent does meanwhile goes to the page cache, and to the same image.
        host.check_served(other)
        shutil.copyfileobj(saved, file)
    host.check_recovered()


def test_too_many_open_files_cost_no_chunk(host):
    mine, other, since = begin(host)
    pid = host.process.pid
    soft, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    # None may be opened any more, whatever is closed meanwhile; those that are open stay.
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (1, hard))
    try:
        assert False in [host.read(name, 0.3) for name in mine]
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (soft, hard))
    assert failed(host, "nvme_read_failed") >= 1
    assert host.has_said("couldn't be read, and stays", since)
    assert host.drive()["is_up"]
    assert all(host.place(0, name).exists() for name in mine)
    host.check_served(other)
    host.check_recovered(mine[0])


def test_a_file_that_can_not_be_removed_stays_counted_until_it_can(host):
    mine, other, since = begin(host)
    kept = host.place(0, mine[0])
    data = bytearray(kept.read_bytes())
    data[-1] ^= 1
    kept.write_bytes(data)
    assert command("chattr", "+i", str(kept))
    try:
        assert not host.read(mine[0])
        eventually(lambda: failed(host, "nvme_unremovable") >= 1, "the failed removal")
        assert host.has_said("can't be removed", since)
        eventually(lambda: uncounted(host.drive()) == file_bytes(CHUNK_BYTES), "its bytes stay counted")
        host.check_served(other)
        eventually(lambda: host.read(mine[1]), "a hit on its neighbour")
    finally:
        assert command("chattr", "-i", str(kept))
    # It is replaced by the next put of its chunk.
    assert host.client.put(label(mine[0]), payload(mine[0]), WAIT_S) is PutResult.STORED
    eventually(lambda: kept.read_bytes() != data, "the new file")
    host.check_recovered(mine[0])


def test_a_folder_that_is_gone_is_withdrawn_and_taken_back(host):
    other = begin(host)[1]
    folder, since = host.folder / "drive-1", len(host.log.read_text())
    [mine] = host.write_on(0)
    host.forget_in_dram()
    folder.rename(host.folder / "away")
    shutil.copytree(host.folder / "away", host.folder / "kept")
    shutil.rmtree(host.folder / "away")
    eventually(lambda: (host.put_one(), host.read(other)) and not host.drive(1)["is_up"], "the quarantine")
    assert "gone" in host.drive(1)["failure"]
    assert host.metric("nvme_drive_up", drive=str(folder)) == 0
    assert host.has_said("is put into quarantine (", since)
    host.check_served(mine)
    (host.folder / "kept").chmod(0o700)
    (host.folder / "kept").rename(folder)
    eventually(lambda: host.drive(1)["is_up"], "the drive's return")
    eventually(lambda: host.read(other), "a hit on what was there")


def test_a_disk_that_hangs_is_left_and_taken_back_when_it_goes_on(host):
    mine, other, since = begin(host)
    assert command("fsfreeze", "-f", str(host.image))
    try:
        eventually(lambda: host.put_one() and not host.drive()["is_up"], "the quarantine")
        assert "hangs" in host.drive()["failure"]
        assert host.metric("nvme_drive_up", drive=str(host.folder / "drive-0")) == 0
        assert host.has_said("is put into quarantine (it hangs", since)
        host.check_served(other)
    finally:
        assert command("fsfreeze", "-u", str(host.image))
    host.check_recovered(mine[0])
