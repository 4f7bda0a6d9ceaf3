import dataclasses
import tomllib
import typing
from pathlib import Path

import pytest

from tripool.core.errors import ConfigError
from tripool.sim.hardware.description import FOLDER, Hardware, hardware_of, known_hardware, read_hardware
from tripool.sim.hardware.topology import blocking, switch_use


def changed(**keys) -> dict:
    """The file of CloudMatrix384 with other values; `die__memory_gb=8` is `memory_gb` of the table `die`."""
    table = tomllib.loads((FOLDER / "cloudmatrix384.toml").read_text())
    for name, value in keys.items():
        *path, last = name.split("__")
        inner = table
        for part in path:
            inner = inner[part]
        inner[last] = value
    return table


def test_the_supernode_is_what_the_paper_says():
    machine = read_hardware("cloudmatrix384")
    assert (machine.num_packages, machine.num_dies, machine.num_cpus, machine.nodes) == (384, 768, 192, 48)
    assert machine.die.memory_gb * machine.package.dies == 128
    assert machine.planes.scale_up.die_gbps * machine.package.dies == 392
    assert machine.planes.scale_out.die_gbps * machine.dies_per_node == 400       # 3.2 Tb/s


@pytest.mark.parametrize("name", known_hardware())
def test_every_machine_that_comes_along_can_be_read_and_does_not_block(name):
    machine = read_hardware(name)
    assert machine.name == name
    assert blocking(machine) == []


@pytest.mark.parametrize(("nodes", "switches", "percent"), [
    (48, 56, 100), (44, 56, 92), (36, 42, 100), (32, 42, 89), (24, 28, 100)])
def test_switches_of_smaller_supernodes_are_those_of_table_10(nodes, switches, percent):
    use = switch_use(read_hardware("cloudmatrix384").planes.scale_up.switches, nodes)
    assert (use.num_switches, round(100 * use.utilisation)) == (switches, percent)


@pytest.mark.parametrize(("nodes", "complaint"), [(0, "at least 1"), (49, "784 ports")])
def test_a_supernode_that_the_switches_cannot_join_is_refused(nodes, complaint):
    with pytest.raises(ConfigError, match=complaint):
        switch_use(read_hardware("cloudmatrix384").planes.scale_up.switches, nodes)


@pytest.mark.parametrize(("change", "complaint"), [
    ({"planes__scale_up__switches__port_gbps": 14}, "uplinks for 1568 GB/s"),
    ({"planes__scale_up__switches__l2_chips": 12}, "12 L2 chips"),
    ({"nodes": 49}, "48 ports for 49 nodes"),
])
def test_a_topology_that_blocks_is_named(change, complaint):
    assert any(complaint in each for each in blocking(hardware_of(changed(**change), "mine.toml")))


def test_there_is_no_default_machine_and_an_unknown_one_is_an_error():
    with pytest.raises(ConfigError, match="no hardware was named"):
        read_hardware("")
    with pytest.raises(ConfigError, match="no hardware 'a40'; known are cloudmatrix384"):
        read_hardware("a40")


def test_a_machine_of_ones_own_is_one_file(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text((FOLDER / "h800.toml").read_text().replace('"h800"', '"mine"').replace("3350", "4000"))
    machine = read_hardware(str(path))
    assert isinstance(machine, Hardware)
    assert (machine.name, machine.die.memory_gbps) == ("mine", 4000)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot read .*none\.toml"):
        read_hardware(str(tmp_path / "none.toml"))


@pytest.mark.parametrize(("change", "complaint"), [
    ({"die__memory_gib": 64}, "mine.toml: unknown key 'die.memory_gib'"),
    ({"die__memory_gb": -1}, "mine.toml: die.memory_gb is -1"),
    ({"package__die_to_die_gbps": -270.0}, "package.die_to_die_gbps is -270"),
    ({"package__usd_per_hour": -1.0}, "package.usd_per_hour is -1"),
    ({"node__host_memory_gb": 0.0}, "node.host_memory_gb is 0"),
    ({"die__memory_gb": "64"}, "mine.toml: die.memory_gb must be float"),
    ({"planes__scale_up__spans": "galaxy"}, "planes.scale_up.spans is 'galaxy'"),
    ({"efficiency__attention": 1.5}, "efficiency.attention has the share 1.5"),
    ({"efficiency__expert": [[100, 0.5], [10, 0.6]]}, "efficiency.expert is .*ascending"),
    ({"exchange__times": []}, "exchange.times has no dispatch"),
    ({"decode_split__expert_cores": 20}, "decode_split has 36 cores"),
    ({"exchange__bulk__cores": 24}, "leaves none of 24"),
])
def test_a_complaint_names_the_file_and_the_key(change, complaint):
    with pytest.raises(ConfigError, match=complaint):
        hardware_of(changed(**change), "mine.toml")


def test_a_missing_key_is_named():
    table = changed()
    del table["die"]["memory_gbps"]
    with pytest.raises(ConfigError, match=r"mine\.toml: die\.memory_gbps is missing"):
        hardware_of(table, "mine.toml")


def fields_of(kind) -> list[str]:
    """Keys of a machine's file, of its tables, too."""
    names = []
    for each in dataclasses.fields(kind):
        names.append(each.name)
        inner = typing.get_type_hints(kind)[each.name]
        for part in (inner, *typing.get_args(inner)):
            if dataclasses.is_dataclass(part):
                names += fields_of(part)
    return names


@pytest.mark.parametrize("page", ["hardware.md", "hardware.zh-CN.md"])
def test_every_key_of_a_machines_file_is_documented(page):
    text = (Path(__file__).parents[3] / "docs" / page).read_text()
    missing = [name for name in fields_of(Hardware) if f"`{name}`" not in text and f"[{name}" not in text
               and f".{name}]" not in text and f"…{name}]" not in text]
    assert missing == []


def test_the_machines_in_the_page_are_those_that_come_along():
    text = (Path(__file__).parents[3] / "docs" / "hardware.md").read_text()
    assert all(f"`{name}`" in text for name in known_hardware())
