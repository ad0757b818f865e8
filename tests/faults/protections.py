"""Take each protection out, and see the suite notice.

    python -m tests.faults.protections             all of them
    python -m tests.faults.protections checksum    those with this in their name

A protection is taken out in a copy of the package, by a change to its text; the faults (or tests)
it is there for are then tried on the copy, and must be lost.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent


@dataclass(frozen=True)
class Protection:
    name: str
    by: str
    """The fault that is lost without it, or the test that fails."""
    edits: tuple[tuple[str, str, str], ...]
    """File, text, and what to write in its place."""


def protection(name: str, by: str, *edits: tuple[str, str, str]) -> Protection:
    return Protection(name, by, edits)


PROTECTIONS = [
    protection(
        "kept state is part of a checkpoint", "kill.kept_state",
        ("training/kept/store.py", "    if not clients:\n", "    if True:\n"),
    ),
    protection(
        "lines after the checkpoint are forgotten", "kill.writing",
        ("experiments/run_directory.py", 'write_whole(self.folder / "rounds.jsonl", saved.rounds)', "pass"),
    ),
    protection(
        "temporary files are removed", "kill.writing",
        ("core/safe_files.py", "path.unlink(missing_ok=True)\n\n\ndef lock", "pass\n\n\ndef lock"),
        ("experiments/checkpoints.py", "_new(draft).mkdir(parents=True)",
         'draft = folder / f".draft-{os.getpid()}-{checkpoint.round:06d}"; draft.mkdir(parents=True)'),
        ("experiments/checkpoints.py", "shutil.rmtree(draft, ignore_errors=True)", "pass"),
    ),
    protection(
        "checksum of the files of a checkpoint", "damage.flipped",
        ("experiments/checkpoints.py", 'if _sha256(content) != manifest["sha256"][name]:', "if False:"),
    ),
    protection(
        "checksum of the manifest", "damage.flipped",
        ("experiments/checkpoints.py", "if stated != _sha256(_canonical(manifest)):", "if False:"),
    ),
    protection(
        "a checkpoint of another run is refused", "damage.swapped",
        ("experiments/checkpoints.py", 'if manifest["run"] != run and manifest["run"] not in before():', "if False:"),
    ),
    protection(
        "a checkpoint has the name of its round", "damage.exchanged",
        ("experiments/checkpoints.py", 'if manifest["round"] != int(path.name):', "if False:"),
    ),
    protection(
        "the checkpoint before is used", "damage.truncated",
        ("experiments/checkpoints.py", "for path in reversed(_complete(folder)):",
         "for path in reversed(_complete(folder)[-1:]):"),
    ),
    protection(
        "no silent beginning", "damage.none_left",
        ("experiments/run_directory.py", "is_new, text = not existing.exists(), ",
         'is_new, text = not (folder / "checkpoints").exists(), '),
    ),
    protection(
        "the old checkpoint stays until the new one is whole", "disk.full",
        ("experiments/checkpoints.py", "    _new(draft).mkdir(parents=True)",
         "    shutil.rmtree(folder, ignore_errors=True)\n    _new(draft).mkdir(parents=True)"),
    ),
    protection(
        "errors of the disk are told in words", "disk.full",
        ("experiments/run_directory.py", "        except OSError as error:\n            raise CannotWrite(\n",
         "        except ZeroDivisionError as error:\n            raise CannotWrite(\n"),
        ("cli/__init__.py", "except OSError as error:", "except ZeroDivisionError as error:"),
    ),
    protection(
        "a directory that cannot be written to is a failed run", "disk.read_only",
        ("experiments/run_directory.py", "        except OSError as error:\n            raise CannotWrite(f",
         "        except OSError as error:\n            raise PrefedError(f"),
    ),
    protection(
        "a client that is not finite is left out", "clients.not_finite",
        ("training/local_trainer.py", "rest = [client for client in clients if client not in bad]",
         "rest = clients"),
    ),
    protection(
        "the quorum", "clients.dropped",
        ("training/run.py", "if len(cohort.answers) >= settings.quorum:", "if cohort.answers:"),
        ("training/run.py", "if arrived is not None and arrived.clients >= settings.quorum:",
         "if arrived is not None:"),
    ),
    protection(
        "updates that are not finite stop the run", "divergence.stop",
        ("training/run.py", "        if not arrived.is_finite:\n", "        if False:\n"),
        ("training/run.py", 'return "" if self.is_whole else', 'return "" if True else'),
    ),
    protection(
        "a step of the server's that overflows stops the run", "divergence.stop",
        ("training/run.py", 'return "" if self.is_whole else', 'return "" if True else'),
    ),
    protection(
        "the state before the blow-up is saved", "divergence.stop",
        ("experiments/run_directory.py", "            self._checkpoint()\n        if len(run.history)",
         "            pass\n        if len(run.history)"),
    ),
    protection(
        "continue on divergence", "divergence.go_on",
        ("training/local_trainer.py", 'self.settings.on_divergence == "stop"', "True"),
    ),
    protection(
        "a dead rank is told in words", "workers.rank",
        ("training/ranks.py", "except RuntimeError as error:", "except ZeroDivisionError as error:"),
    ),
    protection(
        "workers end with their parent", "workers.parent",
        ("experiments/jobs.py", "        os._exit(0)\n", "        return\n"),
    ),
    protection(
        "jobs of a dead worker go to the others", "workers.job",
        ("experiments/jobs.py", "                return  # the jobs that wait", "                continue  #"),
    ),
    protection(
        "Ctrl-C finishes the round and saves", "workers.run",
        ("cli/interrupt.py", "        if self._asked:\n            raise KeyboardInterrupt",
         "        if True:\n            raise ZeroDivisionError"),
    ),
    protection(
        "TOML without end is refused", "fuzz.config_bytes",
        ("experiments/toml_files.py", "    except (ValueError, RecursionError) as error:  # also",
         "    except tomllib.TOMLDecodeError as error:  # also"),
    ),
    protection(
        "what cannot be built is told in words", "fuzz.huge",
        ("experiments/config.py", "            except (RuntimeError, TypeError, ValueError) as error:",
         "            except ZeroDivisionError as error:"),
    ),
    protection(
        "records in run directories are checked", "tests/experiments/test_hostile.py::test_records_are_checked",
        ("experiments/record_lines.py", "if not isinstance(record, dict) or any(record.get(key) is None for key in NUMBERS):",
         "if False:"),
    ),
    protection(
        "pipes and devices are refused", "fuzz.devices",
        ("core/safe_files.py", "if path.exists() and not path.is_file():", "if False:"),
    ),
    protection(
        "saved tensors are compared with the run", "fuzz.forged",
        ("experiments/run_directory.py", "except (ValueError, TypeError, AttributeError, RuntimeError, RecursionError) as error:",
         "except ZeroDivisionError as error:"),
        ("training/trainer.py", "if found is None or found.shape != like.shape or found.dtype != like.dtype:", "if found is None:"),
    ),
    protection(
        "damaged gzip files are told in words", "tests/data/test_data_files.py::test_bad_files",
        ("data/reading.py", "except (EOFError, zlib.error, gzip.BadGzipFile, OSError) as error:",
         "except ZeroDivisionError as error:"),
    ),
    protection(
        "damaged archives are refused", "fuzz.npz",
        ("data/own.py", "zlib.error, ", ""),
        ("data/own.py", "zipfile.BadZipFile, ", ""),
    ),
    protection(
        "pickles are walked, not loaded", "proofs.pickles",
        ("data/cifar_pickle.py", "    position = 0\n    stack: list[Any] = []\n",
         "    import pickle\n    return pickle.loads(path.read_bytes())\n"
         "    position = 0\n    stack: list[Any] = []\n"),
    ),
    protection(
        "arrays of objects are refused", "proofs.pickles",
        ("data/own.py", "    arrays = read_npz(where)\n",
         "    arrays = dict(np.load(where, allow_pickle=True))\n"),
    ),
    protection(
        "no network", "proofs.network",
        ("experiments/environment.py", "    git = subprocess.run(",
         "    import socket\n    socket.getaddrinfo('localhost', 80)\n    git = subprocess.run("),
    ),
    protection(
        "a report imports nothing that a run names", "proofs.strangers",
        ("report/page.py", 'if any(":" in str(value) for value in values):', "if False:"),
    ),
    protection(
        "nothing is kept from round to round", "load.rounds",
        ("training/cohort.py", "        answers = draws",
         '        run.__dict__.setdefault("leak", []).append(run.server.weights.clone())\n'
         "        answers = draws"),
    ),
    protection(
        "files are closed", "load.rounds",
        ("experiments/run_directory.py", "        line = to_json(record)\n",
         "        line = to_json(record)\n        os.open(self.folder, os.O_RDONLY)\n"),
    ),
    protection(
        "records that a checkpoint needs are not written over",
        "tests/training/test_kept.py::test_either_checkpoint_of_a_long_run_will_do[14]",
        ("training/kept/disk.py", "named = self.born[clients] <= newest",
         "named = self.born[clients] > newest"),
    ),
    protection(
        "kept state is compared with its checksum", "damage.kept_flipped",
        ("training/kept/disk.py", "if check_sum(record) != self.sums[client]:", "if False:"),
    ),
    protection(
        "clients are made when they are needed", "load.clients",
        ("training/local_trainer.py", "        self.kept: Store = InMemory()\n",
         "        self.kept: Store = InMemory()\n"
         "        self.all = [data.client(c) for c in range(min(len(data), 200_000))]\n"),
    ),
    *(
        protection(
            f"deployed: {name}",
            f"tests/flower/test_flower.py::test_a_refused_update_is_as_if_its_client_were_not_there[{what}]",
            ("training/admission.py", condition, "if False:"),
        )
        for name, what, condition in (
            ("values are finite", "nan", "if not (-limit <= low and high <= limit):"),
            ("P is not negative", "negative P",
             "if spec.nonnegative and low < 0 and value.dim() < 2:"),
            ("the round is the one asked for", "round",
             "if not _is_int(round) or round != self.round:"),
        )
    ),
    protection(
        "deployed: the sample count is plausible",
        "tests/flower/test_flower.py::test_a_refused_update_is_as_if_its_client_were_not_there[count]",
        ("training/admission.py", "if not _is_int(samples) or not 1 <= samples <= self.largest_count:",
         "if False:"),
        ("training/admission.py", "if known is not None and samples != known:", "if False:"),
    ),
    protection(
        "deployed: an accuracy is one",
        "tests/flower/test_flower_evaluation.py::"
        "test_a_refused_score_is_as_if_its_client_were_not_there[an accuracy of 1.5]",
        ("flower/server.py", "not isinstance(accuracy, float) or not 0 <= accuracy <= 1:",
         "not isinstance(accuracy, float):"),
    ),
    protection(
        "a label of no class is not trained on",
        "tests/data/test_samples.py::test_a_label_of_no_class_is_told_when_it_is_read[Subset-None-sequential]",
        ("data/samples.py", "            self.labels.check(y, numbers)\n", "            pass\n"),
    ),
    protection(
        "deployed: an update counts once", "tests/training/test_hostile_updates.py::test_twice_is_once",
        ("training/admission.py", "if client in self.admitted:", "if False:"),
    ),
    protection(
        "reports escape what users write",
        "tests/report/test_report.py::test_it_is_one_small_file_and_escapes_what_users_write",
        ("report/page.py", "autoescape=True", "autoescape=False"),
    ),
    protection(
        "a live page answers to names of loopback alone",
        "tests/report/test_watch.py::test_nothing_but_the_page_and_its_data_is_served",
        ("report/watch.py", 'if self.headers.get("Host") not in self.server.hosts:', "if False:"),
    ),
    protection(
        "secure: a node gives one secret of each node",
        "tests/flower/test_secure_protocol.py::test_a_node_refuses[both secrets]",
        ("flower/secure/party.py", 'if sorted(survivors + dropped) != self.record["holds"]:',
         'if sorted({*survivors, *dropped}) != self.record["holds"]:'),
    ),
    protection(
        "secure: a node answers each stage once",
        "tests/flower/test_secure_protocol.py::test_a_node_answers_each_stage_once[secure_masked]",
        ("flower/secure/party.py", ' or self.record.get("next") != stage:', ":"),
    ),
    protection(
        "secure: a node wants two thirds",
        "tests/flower/test_secure_protocol.py::test_a_node_refuses[less than two thirds]",
        ("flower/secure/party.py", "if not 2 * len(neighbours) <= 3 * threshold", "if not 0 <= 3 * threshold"),
    ),
    protection(
        "secure: masks depend on the whole secret",
        "tests/flower/test_secure_protocol.py::test_masks_are_long_and_depend_on_all_their_parts",
        ("flower/secure/masks.py", ".derive(secret)", ".derive(secret[:4])"),
    ),
    protection(
        "secure: a vector has a private mask",
        "tests/flower/test_secure_protocol.py::test_masks_as_in_the_papers",
        ("flower/secure/party.py", 'add_mask(vector, self.record["secret"], private_purpose(session, own))',
         "pass"),
    ),
    protection(
        "secure: masks depend on what was told",
        "tests/flower/test_secure_protocol.py::"
        "test_nodes_that_were_told_different_things_have_no_sum",
        ("flower/secure/party.py", 'purpose = b"of two " + told + low', 'purpose = b"of two " + told[:16] + low'),
    ),
    protection(
        "secure: no sums of groups",
        "tests/flower/test_secure_protocol.py::test_groups_with_sums_of_their_own_are_not_unmasked",
        ("flower/secure/session.py", "if stage == m.MASKED and not self._is_connected():", "if False:"),
    ),
    protection(
        "secure: a key of shares is the public one's",
        "tests/flower/test_secure_protocol.py::test_a_key_is_checked_against_the_public_one",
        ("flower/secure/session.py", "        if not fits:\n", "        if False:\n"),
    ),
    protection(
        "secure: numbers do not wrap around",
        "tests/flower/test_secure_fixed_point.py::test_what_is_beyond_the_bound_is_cut_off_and_counted",
        ("flower/secure/fixed_point.py", "np.clip(part, -limit, limit, out=part)", "part"),
    ),
    protection(
        "secure: a sum that cannot be is refused",
        "tests/flower/test_secure_aggregation.py::"
        "test_a_sum_that_honest_nodes_do_not_have_is_refused[noise]",
        ("flower/secure/secure_trainer.py", "if self.knows_weights and int(sums[0]) != weights:", "if False:"),
        ("flower/secure/vector.py", "if not 1 <= weight <= weights or clipped < 0 or not form.fits(total[HEAD:], weight):",
         "if False:"),
    ),
    protection(
        "secure: nothing leaves a node in the clear",
        "tests/flower/test_secure_aggregation.py::"
        "test_a_node_sends_nothing_in_the_clear_if_its_owner_says_so",
        ("flower/secure/node.py", "    if is_wanted(context):\n", "    if False:\n"),
    ),
]  # fmt: skip


def noticed(what: Protection) -> tuple[bool, str]:
    """Whether the suite loses something without it, and the last line it printed."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "prefed"
        shutil.copytree(ROOT / "src" / "prefed", copy, ignore=shutil.ignore_patterns("__pycache__"))
        for name, old, new in what.edits:
            text = (copy / name).read_text()
            if text.count(old) != 1:
                return False, f"{name} has no such line any more: {old!r}"
            (copy / name).write_text(text.replace(old, new))
        words = ["-m", "tests.faults", "--quick", "--first", what.by]
        if what.by.startswith("tests/"):
            words = ["-m", "pytest", "-p", "no:xdist", "-p", "no:cacheprovider", what.by]
        path = os.pathsep.join([folder, str(ROOT)])
        done = subprocess.run(
            [sys.executable, *words],
            env={**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"},
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
            timeout=600,
        )
    last = done.stdout.strip().rpartition("\n")[2]
    lost = last.startswith("lost ") and not last.startswith("lost 0")
    return done.returncode == 1 and (lost or " failed" in last), last or done.stderr[-300:]


def main(wanted: list[str]) -> int:
    chosen = [p for p in PROTECTIONS if not wanted or any(word in p.name for word in wanted)]
    width = max(len(p.name) for p in chosen)
    missed = 0
    print(f"{'protection taken out':<{width}}  noticed  by")
    with ThreadPoolExecutor(2) as pool:
        for what, (seen, last) in zip(chosen, pool.map(noticed, chosen), strict=True):
            missed += not seen
            by = f"{what.by}: {last}"
            print(f"{what.name:<{width}}  {'yes' if seen else 'NO':<7}  {by}", flush=True)
    print(f"not noticed {missed} of {len(chosen)}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
