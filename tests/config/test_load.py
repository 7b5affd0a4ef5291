"""Options from files, keywords, mappings and folders: one schema, one validation."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from ckpt_engine.config import OPTION_NAMES, Config, load_config
from ckpt_engine.errors import ConfigError
from ckpt_engine.frequency.policy import FrequencySettings

OPTIONS: dict[str, Any] = {
    "overhead": "3.5%",
    "max_lost_work": "10 min",
    "mtbf": "6 h",
    "every_n_steps": 500,
    "every_seconds": "1 h",
    "at_steps": (1, 40),
    "on_validation_end": True,
    "at_end": False,
    "keep": {"last": 3, "every_n_steps": 1000, "best": {"monitor": "val_loss", "mode": "max", "k": 2}},
    "tiers": [{"url": "/data/run1", "keep": {"last": 5}}],
    "on_error": "raise",
    "writer": "thread",
    "linger": "1 min",
    "slots": 1,
    "lazy": "off",
    "pickle": ["loop/*"],
}
YAML = """
overhead: 3.5%
max_lost_work: 10 min
mtbf: 6 h
every_n_steps: 5e2          # YAML 1.1 readers make a text of this
every_seconds: 1 h
at_steps: [1, 40]
on_validation_end: yes      # and a boolean of this
at_end: false
keep: {last: 3, every_n_steps: 1000, best: {monitor: val_loss, mode: max, k: 2}}
tiers:
  - url: /data/run1
    keep: {last: 5}
on_error: raise
writer: thread
linger: 1 min
slots: 1
lazy: off
pickle: loop/*
"""


def _yaml(folder: Path, text: str, name: str = "ckpt.yaml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_the_list_of_options_is_frozen() -> None:
    """Adding, renaming or reordering an option is a decision: change this list together with the documentation."""
    assert OPTION_NAMES == (
        "overhead",
        "max_lost_work",
        "mtbf",
        "every_n_steps",
        "every_seconds",
        "at_steps",
        "on_validation_end",
        "at_end",
        "wait_at_end",
        "keep",
        "protect",
        "seal",
        "tiers",
        "preemption",
        "status",
        "log",
        "on",
        "guard",
        "rollback",
        "resume",
        "on_error",
        "writer",
        "linger",
        "slots",
        "lazy",
        "rng",
        "data",
        "hidden",
        "replay",
        "pickle",
    )


def test_defaults() -> None:
    """Only the place of the run has to be given."""
    config = load_config("/data/run1")
    assert config.root_url == "/data/run1"
    assert config.overhead == 0.01
    assert (config.max_lost_work, config.mtbf, config.every_n_steps, config.every_seconds) == (None, "auto", None, None)
    assert (config.on_validation_end, config.at_end) == (False, True)
    assert (config.keep.last, config.keep.every_n_steps, config.keep.best) == (2, None, None)
    assert (config.on_error, config.writer, config.slots, config.lazy) == ("raise_at_end", "process", 2, "auto")
    assert config.pickle == ()


def test_every_way_to_say_the_same_makes_the_same_config(tmp_path: Path) -> None:
    """A YAML file, a mapping, keywords, a folder plus keywords, OmegaConf and a Config are one schema."""
    config = load_config(OPTIONS)
    keywords = {name: value for name, value in OPTIONS.items() if name != "tiers"}
    assert load_config(_yaml(tmp_path, YAML)) == config
    assert load_config(str(_yaml(tmp_path, YAML, "other.YML"))) == config
    assert load_config(**OPTIONS) == config
    assert load_config(OmegaConf.create(OPTIONS)) == config
    assert load_config(config) == config
    assert load_config(config.options()) == config
    assert load_config("/data/run1", **keywords).keep == config.keep


def test_all_quantities_arrive_in_base_units() -> None:
    """Durations are seconds and shares are numbers once loaded."""
    config = load_config(OPTIONS)
    assert (config.overhead, config.max_lost_work, config.mtbf) == (0.035, 600.0, 21600.0)
    assert (config.every_n_steps, config.every_seconds) == (500, 3600.0)
    assert config.keep.best is not None
    assert (config.keep.best.monitor, config.keep.best.mode, config.keep.best.k) == ("val_loss", "max", 2)


def test_keywords_win_over_the_file_and_none_is_not_given(tmp_path: Path) -> None:
    """A keyword replaces the file's value of the same name; adapters pass None for what the user left out."""
    path = _yaml(tmp_path, YAML)
    config = load_config(path, overhead=0.02, keep={"last": 9}, tiers="/elsewhere", writer=None)
    assert (config.overhead, config.writer, config.root_url) == (0.02, "thread", "/elsewhere")
    assert (config.keep.last, config.keep.best) == (9, None)


def test_keywords_win_over_a_config() -> None:
    """A Config can be the base of another one; values that were not given keep following the defaults."""
    config = load_config(load_config("/data/run1", slots=1), overhead="5%")
    assert config == load_config("/data/run1", slots=1, overhead="5%")
    assert "writer" not in config.options()


def test_relative_folders_are_relative_to_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That is so in a YAML file that lies elsewhere as well; `~` is the home folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/someone")
    (tmp_path / "conf").mkdir()
    path = _yaml(tmp_path / "conf", "tiers: runs/../runs/1\n")
    assert load_config(path).root_url == str(tmp_path / "runs/1")
    assert load_config(Path("runs/1")).root_url == str(tmp_path / "runs/1")
    assert load_config("~/runs").root_url == "/home/someone/runs"
    assert load_config("file:///data/run%201").root_url == "file:///data/run%201"


@pytest.mark.parametrize(
    ("place", "found"),
    [
        ("$SCRATCH/run1", "/scratch/me/run1"),
        ("${SCRATCH}-2/run1", "/scratch/me-2/run1"),
        ("$UP/run1", "/home/someone/up/run1"),
        ("file://$SCRATCH/run1", "file:///scratch/me/run1"),
        ("s3://bucket/$JOB_ID/run", "s3://bucket/17/run"),
        ("/data/$/a$", "/data/$/a$"),
    ],
)
def test_variables_of_the_environment_are_replaced_in_places(
    place: str, found: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As keyword, in a mapping, in a list of tiers and in a file; the path of a file may have one as well."""
    for name, value in {"SCRATCH": "/scratch/me", "UP": "~/up", "JOB_ID": "17", "HOME": "/home/someone"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("CONF", str(tmp_path))
    _yaml(tmp_path, f"tiers: {place}\n")
    given: list[Any] = [place, {"tiers": place}, {"tiers": [{"url": place}]}, "$CONF/ckpt.yaml"]
    assert [load_config(one).root_url for one in given] == [found] * 4
    assert load_config(tiers=["/d", place]).tiers[1].url == found


@pytest.mark.parametrize("place", ["$SCRATCH/run1", "${SCRATCH}/run1", "s3://bucket/$SCRATCH", "/data/$SCRATCH/run1"])
@pytest.mark.parametrize("empty", [False, True])
def test_a_variable_that_is_not_set_is_refused_by_its_name(
    place: str, empty: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the run would be in a folder named $SCRATCH, or, where it is empty, in the root of the machine."""
    monkeypatch.setenv("SCRATCH", "")
    if not empty:
        monkeypatch.delenv("SCRATCH")
    with pytest.raises(ConfigError, match="environment variable SCRATCH is not set") as caught:
        load_config(place)
    assert caught.value.code == "CKPT100"


def test_a_folder_may_be_called_yaml(tmp_path: Path) -> None:
    """An existing folder is a place for snapshots whatever its name."""
    (tmp_path / "run.yaml").mkdir()
    assert load_config(tmp_path / "run.yaml").root_url == str(tmp_path / "run.yaml")


def test_what_yaml_1_1_makes_of_an_unquoted_on_or_off_is_understood() -> None:
    """LightningCLI and other readers deliver `lazy: off` as False and `lazy: on` as True."""
    assert load_config("/data/run1", lazy=False).lazy == "off"
    assert load_config("/data/run1", lazy=True).lazy == "on"


def test_tier_retention_replaces_the_general_one() -> None:
    """`keep` inside the tier is what holds there."""
    assert load_config("/data/run1", keep={"last": 7}).root_keep.last == 7
    assert load_config(tiers=[{"url": "/d", "keep": {"last": 9}}], keep={"last": 7}).root_keep.last == 9
    for config, rules in (
        (load_config("/data/run1"), {"last": 2}),
        (load_config(OPTIONS, tiers="/d"), OPTIONS["keep"]),
    ):
        assert config.keep_rules(config.tiers[0]) == rules


@pytest.mark.parametrize("place", ["/d", Path("/d"), ["/d"], [{"url": "/d"}], {"url": "/d"}, ({"url": Path("/d")},)])
def test_the_place_can_be_bare_or_a_list(place: Any) -> None:
    """A bare folder, a tier, and a list of one of them are one tier."""
    assert load_config(tiers=place).root_url == "/d"


MEMORY_TIER = {"url": "memory", "every_n_steps": 1}


def test_the_memory_tier_stands_before_the_places() -> None:
    """`tiers` are the durable ones, whatever is before them; the memory tier has a rhythm or none."""
    config = load_config(tiers=["memory", "/d", "s3://b/r"], linger="10 min")
    assert (config.root_url, [tier.url for tier in config.tiers]) == ("/d", ["/d", "s3://b/r"])
    assert config.memory is not None
    assert (config.memory.every, config.memory.every_n_steps, config.linger) == (None, None, 600.0)
    config = load_config(tiers=[MEMORY_TIER, "/d"])
    assert config.memory is not None
    assert (config.root_url, config.memory.every_n_steps, config.linger) == ("/d", 1, 300.0)
    assert load_config("/d").memory is None


def test_the_memory_tier_has_a_slot_more() -> None:
    """One complete, one being staged, one being written; only the last counts as in flight for the frequency."""
    assert (load_config("/d").arena_slots, load_config(tiers=["memory", "/d"]).arena_slots) == (2, 3)
    assert load_config(tiers=["memory", "/d"], slots=2).arena_slots == 2
    assert FrequencySettings.of(load_config(tiers=["memory", "/d"], slots=5)).slots == 3
    assert FrequencySettings.of(load_config(tiers=["memory", "/d"], slots=2)).slots == 1
    assert FrequencySettings.of(load_config("/d")).slots == 2


def test_the_memory_tier_survives_every_way_a_config_travels() -> None:
    """Options again, a copy, a pickle, and as the base of another one; two that differ in it only are not equal."""
    config = load_config(tiers=[MEMORY_TIER, {"url": "/d", "keep": {"last": 3}}])
    assert config.options()["tiers"] == [MEMORY_TIER, {"url": "/d", "keep": {"last": 3}}]
    for other in (load_config(config.options()), load_config(config), pickle.loads(pickle.dumps(config))):
        assert other == config
        assert other.memory == config.memory
    assert copy.deepcopy(config) == config
    assert load_config(config, overhead="2%").memory == config.memory
    assert load_config(tiers=["memory", "/d"]) != load_config("/d")
    settings = FrequencySettings.of(config)
    assert settings.memory is not None
    assert (settings.memory.every_n_steps, settings.memory.every_seconds) == (1, None)
    assert FrequencySettings.of(load_config("/d")).memory is None


def test_a_config_is_frozen_and_travels() -> None:
    """It cannot be changed, and can be copied and pickled (launchers that spawn do)."""
    config = load_config(OPTIONS)
    with pytest.raises(ValueError, match="frozen"):
        config.overhead = 0.5
    assert pickle.loads(pickle.dumps(config)) == copy.deepcopy(config) == config


def test_both_the_place_and_tiers_is_refused() -> None:
    """A folder as the source is the tier; a second one would be ignored or guessed."""
    with pytest.raises(ConfigError, match="given twice: as '/a' and as the keyword 'tiers'"):
        load_config("/a", tiers="/b")


def test_frequency_settings_tell_given_from_default() -> None:
    """A fixed interval alone replaces the adaptive one, so a default differs from a given value."""
    assert FrequencySettings.of(load_config("/d", every_n_steps=500)).overhead is None
    assert FrequencySettings.of(load_config("/d", every_n_steps=500, overhead="1%")).overhead == 0.01
    assert FrequencySettings.of(load_config("/d")).mtbf_seconds is None
    slow = load_config(tiers=[{"url": "/d", "bandwidth": "20 MB/s"}, {"url": "/e", "bandwidth": "1 MB/s"}])
    assert FrequencySettings.of(slow).bandwidth_bytes_per_second == 20e6
    settings = FrequencySettings.of(load_config(OPTIONS))
    assert (settings.overhead, settings.mtbf_seconds, settings.every_n_steps) == (0.035, 21600.0, 500)
    assert (settings.max_lost_work_seconds, settings.every_seconds, settings.slots) == (600.0, 3600.0, 1)
    assert (settings.on_validation_end, settings.at_end) == (True, False)


def test_work_that_may_be_lost_has_a_limit_for_each_class_of_failures() -> None:
    """One duration is for the process and the machine."""
    for given, limits in (
        ("10 min", {"process": 600.0, "machine": 600.0}),
        ({"process": "1 min", "site": "2 h"}, {"process": 60.0, "site": 7200.0}),
    ):
        assert FrequencySettings.of(load_config("/d", max_lost_work=given)).limits == limits


def test_importing_config_does_not_import_torch() -> None:
    """The command line starts without torch."""
    code = "import ckpt_engine.config, sys; assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_config_type_is_exported() -> None:
    """`load_config` returns the public type."""
    assert type(load_config("/data")) is Config


@pytest.mark.parametrize("given", [{"keep": 3}, "keep: 3\ntiers: /d\n", {"tiers": [{"url": "/d", "keep": 3}]}])
def test_a_number_of_snapshots_is_the_rule_last(given: Any, tmp_path: Path) -> None:
    """As a keyword, in a file and on a tier."""
    if isinstance(given, str):
        (tmp_path / "ckpt.yaml").write_text(given)
        given = tmp_path / "ckpt.yaml"
    config = load_config(given if isinstance(given, Path) else {"tiers": "/d", **given})
    assert config.keep_rules(config.tiers[0]) == {"last": 3}
    assert load_config(config.options()) == config
