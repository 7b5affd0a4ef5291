"""What is wrong is said with source, line, full key path, bad value, allowed keys and nearest match."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_engine.config import OPTION_NAMES, Config, load_config
from ckpt_engine.errors import ConfigError

KEEP = "last, every_n_steps, hourly, daily, weekly, age, best, quota, min_free, components"
TIER = (
    "url, every, every_n_steps, replicate, parity, keep, protect, bandwidth, concurrency, on_failure, codec, "
    "storage_options, seal"
)
ALL = ", ".join(OPTION_NAMES)


def _message(source: Any = "/data/run1", /, **options: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(source, **options)
    assert "pydantic" not in str(caught.value).lower()
    assert caught.value.code == "CKPT100"
    return str(caught.value)


def _file(tmp_path: Path, text: str) -> str:
    path = tmp_path / "ckpt.yaml"
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"overhed": 1}, "overhed: unknown key; did you mean 'overhead'? →"),
        ({"zzz": 1}, f"zzz: unknown key (allowed: {ALL})"),
        ({"folder": "/d"}, "folder: unknown key; here it is tiers"),
        ({"status": {"path": "/d"}}, "status.path: unknown key; here it is file"),
        ({"log": {"path": "/d"}}, "log.path: unknown key (allowed"),
        ({"monitor": "x"}, "monitor: unknown key; it belongs under 'keep.best'"),
        ({"keep": {"slots": 1}}, "keep.slots: unknown key; it belongs to the top level"),
        ({"keep": {"lst": 3}}, "keep.lst: unknown key; did you mean 'last'? →"),
        ({"keep": {"last": 0}}, "keep.last: must be a whole number of at least 1, got 0"),
        ({"keep": {"last": "two"}}, "keep.last: must be a whole number, got 'two'"),
        ({"keep": {"last": None}}, "keep.last: must be a whole number, got null"),
        ({"keep": "3"}, "keep: must be a mapping such as {last: 3}, got '3'"),
        ({"keep": {"quota": "5%"}}, "keep.quota: must be a size such as '500 GB'"),
        ({"keep": {"components": {"optimizer": {"lst": 1}}}}, "keep.components.optimizer.lst: unknown key; did you"),
        ({"keep": {"components": {"optimizer": {"quota": 1}}}}, "quota: unknown key; it belongs under 'keep'"),
        ({"keep": {"best": "loss"}}, "keep.best: must be a mapping such as {monitor: val_loss, mode: min}, got 'loss'"),
        ({"keep": {"best": {"k": 1}}}, "keep.best.monitor: missing"),
        ({"keep": {"best": {"monitor": ""}}}, "keep.best.monitor: must be a text that is not empty, got ''"),
        ({"keep": {"best": {"monitor": "l", "mode": "mim"}}}, "mode: must be 'min' or 'max', got 'mim'; did you mean"),
        ({"overhead": -0.01}, "overhead: must be above 0% and below 100%, got -0.01"),
        ({"overhead": "much"}, "overhead: must be a share such as '1%' or 0.01, got 'much'"),
        ({"overhead": True}, "overhead: must be a share such as '1%' or 0.01, got true"),
        (
            {"max_lost_work": {"node": "1 min"}},
            "max_lost_work: takes a duration, or durations for process, machine, site, not 'node'",
        ),
        ({"max_lost_work": "-10 min"}, "max_lost_work: must be a duration above 0, got '-10 min'"),
        ({"mtbf": "never"}, "mtbf: must be a duration such as '10 min'"),
        ({"mtbf": "never"}, "or a number of seconds, or 'auto', got 'never'"),
        ({"every_n_steps": 1.5}, "every_n_steps: must be a whole number, got 1.5"),
        ({"at_steps": 5}, "at_steps: must be a list, got 5"),
        ({"at_steps": [0]}, "at_steps.0: must be a whole number of at least 1, got 0"),
        ({"preemption": {"sources": "http"}}, "preemption.sources: must be a list"),
        ({"at_end": 1}, "at_end: must be true or false, got 1"),
        (
            {"on_error": "rais"},
            "on_error: must be 'raise_at_end' or 'raise' or 'warn', got 'rais'",
        ),
        ({"lazy": 1}, "lazy: must be 'auto' or 'on' or 'off', got 1"),
        ({"slots": "x" * 200}, f"slots: must be a whole number, got '{'x' * 56}... →"),
        ({"pickle": True}, "pickle: must be a list of paths such as ['loop/custom', 'callbacks/*'], got true"),
        ({"pickle": [1]}, "pickle: must be a text that is not empty, got [1]"),
        (
            {"tiers": ["memory", "/d"], "writer": "thread"},
            "writer: the memory tier needs a writer that outlives the trainer: must be 'process', got 'thread'",
        ),
        ({"tiers": ["memory", "/d"], "slots": 1}, "slots: must be at least 2 with the memory tier"),
        ({"keep": {True: 1}}, "keep.True: a key must be a text, not the bool true: YAML 1.1 reads an unquoted on"),
        ({"keep": {7: 1}}, "keep.7: a key must be a text, not the int 7"),
    ],
)
def test_each_mistake_has_its_own_text(options: dict[str, Any], text: str) -> None:
    """Unknown keys, wrong types and impossible values name the key path, the value and what is allowed."""
    message = _message(None if "tiers" in options else "/data/run1", **options)
    assert text in message
    assert message.startswith("[CKPT100] options: ")
    assert len(message.splitlines()) == 1


@pytest.mark.parametrize(
    ("tiers", "text"),
    [
        ("", "tiers: must be a text that is not empty"),
        ([], "tiers: must name a folder"),
        (
            5,
            f"tiers: must be a mapping with keys among {TIER}, got 5",
        ),
        (
            [5],
            f"tiers.0: must be a mapping with keys among {TIER}, got 5",
        ),
        ([{"keep": {}}], "tiers.0.url: missing; name a folder for the snapshots"),
        (
            [{"url": "/d", "kep": {}}],
            "tiers.0.kep: unknown key; did you mean 'keep'? →",
        ),
        ([{"url": "/d", "codec": "auto"}], "tiers: auto weighs the link of a further tier"),
        ([{"url": "s3://b/d", "codec": "delta"}], "tiers: delta reads back what is there"),
        (
            ["/d", {"url": "/e", "codec": "zsdt"}],
            "tiers.1.codec: must be 'raw' or 'zstd' or 'byteplane-zstd'",
        ),
        (["/d", {"url": "/e", "codec": "int8"}], "tiers.1.codec: 'int8' would lose bits"),
        (["memory", {"url": "/d", "codec": "auto"}], "tiers: auto weighs the link"),
        ([{"url": "memory", "codec": "zstd"}, "/d"], "tiers.0: the memory tier takes every or every_n_steps"),
        ([{"url": "/d", "keep": {"last": -1}}], "tiers.0.keep.last: must be a whole number of at least 1, got -1"),
        ("file://d", "tiers: a file URL has three slashes"),
        ("$NOT_SET/d", "tiers: the environment variable NOT_SET is not set"),
        ("${NOT_SET}/d", "tiers: the environment variable NOT_SET is not set"),
        (["/d", "s3://$NOT_SET/d"], "tiers.1: the environment variable NOT_SET is not set"),
        ([{"url": "/d/$HOME-$NOT_SET"}], "tiers.0.url: the environment variable NOT_SET is not set"),
        ("~nouser/d", "tiers: no home folder is known for a leading ~; a folder of that name: ./~nouser/d"),
        ("s3:/b/d", "tiers: a URL has a colon and two slashes: s3://b/d; a folder of that name: ./s3:/b/d"),
        ("s3//b/d", "tiers: a URL has a colon and two slashes: s3://b/d; a folder of that name: ./s3//b/d"),
        ("GS:b/d", "tiers: a URL has a colon and two slashes: GS://b/d; a folder of that name: ./GS:b/d"),
        ("new:/b/d", "tiers: a URL has a colon and two slashes: new://b/d; a folder of that name: ./new:/b/d"),
        ([{"path": "/d"}], "tiers.0.path: unknown key; here it is url"),
        (" s3://b/d", "tiers: a URL begins with its scheme, such as s3://bucket/run"),
        (None, "tiers: missing; name a folder for the snapshots"),
    ],
)
def test_mistakes_in_tiers_name_the_tier(tiers: Any, text: str) -> None:
    """The path has the position in the list, unless a bare place was written."""
    assert f"options: {text}" in _message(None, tiers=tiers)


@pytest.mark.parametrize("url", ["s3//me:hunter2@b/d", "s3:/me:hunter2@b/d", "az:c/d?sig=hunter2"])
def test_a_url_without_its_colon_is_not_shown_where_it_may_have_a_secret(url: str) -> None:
    """A login or a signature would go to every log."""
    message = _message(None, tiers=url)
    assert "a URL has a colon and two slashes" in message and "hunter2" not in message


@pytest.mark.parametrize("folder", ["./s3//b/d", "s3/b", "s3x//b", "runs//a", "files", "gs"])
def test_a_folder_may_look_a_little_like_a_url(folder: str) -> None:
    """Two slashes are what a path and a name that are put together often have."""
    assert load_config({"tiers": folder}).tiers[0].url == str(Path.cwd() / folder)


def test_a_key_that_is_something_else_here_is_refused_with_that() -> None:
    """In each section; its value, maybe a secret, is not shown."""
    message = _message(None, tiers="/a", keep={"tags": ["hunter2"]})
    assert " keep.tags: unknown key; here it is `ckpt pin --tag`" in message
    assert "hunter2" not in message


SECRET = {"url": "/b", "storage_options": {"secret": "hunter2"}}


@pytest.mark.parametrize(
    ("tiers", "text"),
    [
        ("s3://user:hunter2@bucket/run", "tiers: must not contain a password; put credentials in storage_options"),
        ("s3://user:hun/ter2@bucket/run", "tiers: must not contain a password; put credentials in storage_options"),
        ([{**SECRET, "storage_options": "hunter2"}], "tiers.0.storage_options: must be a mapping of options"),
        (["/a", {**SECRET, "every": 60, "every_n_steps": 5}], "tiers.1: give either every or every_n_steps"),
        (
            [{**SECRET, "every": 60}, "/a"],
            "tiers: the nearest tier takes every durable snapshot: remove its every",
        ),
        ([SECRET, "/b/"], "tiers: two tiers are the same place"),
        ([SECRET, "memory"], "tiers: the memory tier is the nearest one: it comes first"),
        (["memory"], "tiers: must name a folder or storage URL, too: memory does not outlive the machine"),
        ("memory", "tiers: must name a folder or storage URL"),
        (["memory", "memory", "/a"], "tiers: the memory tier is the nearest one: it comes first, and once"),
        (
            [{**SECRET, "url": "memory", "keep": {"last": 1}}, "/a"],
            "tiers.0: the memory tier takes every or every_n_steps: remove its keep and storage_options",
        ),
        (["memory", {"url": "/a", "kep": 1}], "tiers.1.kep: unknown key; did you mean 'keep'?"),
        ([{**SECRET, "bandwidth": "200 Mb/s"}], "tiers.0.bandwidth: must be a rate such as '200 MB/s'"),
        (
            [{**SECRET, "on_failure": "fial"}],
            "tiers.0.on_failure: must be 'degrade' or 'fail', got 'fial'; did you mean",
        ),
        ([{**SECRET, "concurrency": 0}], "tiers.0.concurrency: must be a whole number of at least 1, got 0"),
    ],
)
def test_mistakes_in_tiers_are_reported_without_secrets(tiers: object, text: str) -> None:
    """What a tier carries for its storage, or in its URL, is in no message."""
    message = _message(None, tiers=tiers)
    assert text in message
    assert "hunter2" not in message


def test_several_problems_are_listed_one_per_line_with_file_and_line(tmp_path: Path) -> None:
    """All mistakes of a file are reported at once, in its order; mistakes in keywords are listed as such."""
    path = _file(
        tmp_path, "overhed: 1%\nslots: 0\nkeep:\n  last: 3\n  best: {mode: min}\ntiers:\n  - url: /d\n    codec: x\n"
    )
    lines = _message(path, mtbf="x").splitlines()
    assert lines[0] == "[CKPT100] 5 problems:"
    assert [re.sub(r": (unknown|must|missing|not).*", "", line.strip()) for line in lines[1:6]] == [
        "options: mtbf",
        f"{path}, line 1: overhed",
        f"{path}, line 2: slots",
        f"{path}, line 5: keep.best.monitor",
        f"{path}, line 8: tiers.0.codec",
    ]
    assert "`ckpt schema` prints every option" in lines[-1]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("tiers: [", "ckpt.yaml, line 1, column 9: not valid YAML: while parsing a flow node"),
        ("a: b: c", "not valid YAML: mapping values are not allowed here"),
        ("tiers: /d\nslots: 1\nslots: 2\n", "ckpt.yaml, line 3: slots: given twice, first on line 2"),
        ("tiers: /d\nkeep: {last: 1, last: 2}\n", "ckpt.yaml, line 2: keep.last: given twice"),
        ("- /d\n", "must contain a mapping such as 'tiers: /data/run1'"),
        ("/d\n", "must contain a mapping"),
        ("tiers: /d\n---\ntiers: /e\n", "not valid YAML: expected a single document"),
        ("tiers: !!python/object:os.system {}\n", "not valid YAML: could not determine a constructor"),
        ("? [a]\n: b\n", "not valid YAML: while constructing a mapping, found unhashable key"),
        ("tiers: /d\n1: x\n", "line 2: 1: a key must be a text, not the int 1"),
        ("", "tiers: missing"),
        ("# nothing\n", "tiers: missing"),
        ("on: x\ntiers: /d\n", "line 1: on: must be a mapping with keys among failure, stop, durable, timeout"),
    ],
)
def test_broken_files(tmp_path: Path, text: str, expected: str) -> None:
    """Files that are not YAML, or not a mapping, or ambiguous are refused with file and place."""
    message = _message(_file(tmp_path, text))
    assert expected in message
    assert "ckpt.yaml" in message


def test_yaml_1_1_surprises_do_not_happen(tmp_path: Path) -> None:
    """`10:00` is not six hundred, `1e-2` is a number, `off` is a word; anchors and merge keys work."""
    assert "got '10:00'" in _message(_file(tmp_path, "tiers: /d\nmax_lost_work: 10:00\n"))
    config = load_config(_file(tmp_path, "tiers: [{url: /d, keep: &k {last: 4}}]\nkeep: {<<: *k}\noverhead: 1e-2\n"))
    assert (config.keep.last, config.root_keep.last, config.overhead) == (4, 4, 0.01)


def test_aliases_that_contain_themselves_end(tmp_path: Path) -> None:
    """A cyclic document is refused instead of followed forever, and so is a mapping of the user's."""
    assert "line 3, column 9: not valid YAML: an alias that contains itself" in _message(
        _file(tmp_path, "tiers: /d\nkeep: &k\n  best: *k\n")
    )
    keep: dict[str, object] = {}
    keep["best"] = keep
    with pytest.raises(ConfigError, match=r"keep: nested too deeply; does it contain itself\?"):
        load_config({"tiers": "/d", "keep": keep})


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    """A binary file with the suffix is said to be no YAML."""
    path = tmp_path / "ckpt.yaml"
    path.write_bytes(b"tiers: \xff\x00")
    assert "not valid YAML" in _message(path)


def test_a_missing_file_is_not_taken_for_a_folder() -> None:
    """`ckpt.yaml` that does not exist would otherwise become a folder of that name."""
    assert _message("no/such/ckpt.yaml").startswith("[CKPT100] no/such/ckpt.yaml: no such file")


def test_an_unreadable_file_says_why(tmp_path: Path) -> None:
    """What the system said about the file is passed on."""
    path = tmp_path / "ckpt.yaml"
    path.symlink_to(path)
    assert "ckpt.yaml: " in _message(path)


@pytest.mark.parametrize("source", [3, b"/data", ["/data"], Path])
def test_sources_of_other_types_are_refused(source: Any) -> None:
    """Options come from None, text, path, mapping or Config, and from no other type."""
    assert "cannot be read as options" in _message(source)


_KEYS = st.sampled_from([*OPTION_NAMES, "last", "best", "monitor", "url", "codec", "x", ""])
_SCALARS = st.sampled_from(
    [None, True, 0, 1, 7, -1, 0.5, float("nan"), 10**400, "", "1%", "2 h", "auto", "/d", "max", b"x"]
)
_VALUES = st.recursive(
    _SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_KEYS | st.integers(), inner, max_size=3)
)


@given(st.dictionaries(_KEYS | st.booleans(), _VALUES, max_size=6))
def test_any_mapping_is_a_config_or_a_config_error(options: dict[Any, Any]) -> None:
    """No input gets past validation in another way, and what is accepted loads again to the same."""
    try:
        config = load_config(options)
    except ConfigError:
        return
    assert isinstance(config, Config)
    assert load_config(config.options()) == config


FORMER = re.findall(
    r"^\| (`[^|]*) \| (.*) \|$", (Path(__file__).parents[2] / "docs/migrate.md").read_text(), re.MULTILINE
)


@pytest.mark.parametrize(("old", "new"), [(old, new) for names, new in FORMER for old in re.findall(r"`(\w+)`", names)])
def test_the_option_of_another_library_is_answered_with_ours(old: str, new: str) -> None:
    """As the page of the migration has it, whose every row is known here."""
    assert len(FORMER) > 15, "the search finds nothing"
    message = _message(**{old: 1})
    answer = re.split("; here it is |; it belongs ", message)[1].partition(" (allowed")[0]
    ours = [
        *OPTION_NAMES,
        "keep.best",
        "`ckpt ls`",
        "`ckpt export`",
        "safetensors",
        "CkptWriter",
        "CkptReader",
        "`save`",
    ]
    named = {one for one in ours if re.search(rf"(?<!\w){re.escape(one)}(?!\w)", answer)}
    words = {one.strip("`").partition(".")[0] for one in named}
    assert words and all(word in new for word in words), (answer, new)
