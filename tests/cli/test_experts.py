import io
import json

import msgspec
import pytest
from PIL import Image
from rich.console import Console

from tests import fleet
from tests.cli.fake_server import Script, fake_server_beside, tripool
from tripool.api.schema import ExchangeCounts, ExpertsResponse, LayerExperts, MemberExperts
from tripool.cli.expert_loads import fold, rank_shares, relative_loads, worst
from tripool.cli.experts import render
from tripool.core.errors import ConfigError, RequestError

FIRST = LayerExperts([8, 2, 2, 4], [0, 1, 3, 2, 0], [10, 6], [12, 4], 1.25, 1.5)
SECOND = LayerExperts([0, 0, 3, 1], [0, 1, 2, 2, 3], [1.5, 2.5], [1.5, 2.5], 1.25, None)


def member(**changes) -> MemberExperts:
    """Two layers of four experts on two ranks."""
    values = dict(
        member="hybrid-0", map_version=7, runnable=True, num_steps=200, num_experts=4, num_routed=4,
        slots_per_rank=[3, 2], layers=[FIRST, SECOND], lost_ranks=[], layers_planned=1, layers_changed=1,
        layers_gated=0, layers_blocked=0, num_moves=3, moved_bytes=3 << 20, num_failures=0, cause="",
        exchange=[ExchangeCounts(1.5, 2048, 1, 1), None])
    return MemberExperts(**(values | changes))


def alone(**changes) -> MemberExperts:
    """The same experts on one rank."""
    layers = [LayerExperts(each.loads, [0, 1, 2, 3], [sum(each.loads)], [sum(each.loads)], 1.0, None)
              for each in (FIRST, SECOND)]
    return member(slots_per_rank=[4], layers=layers, exchange=[None], map_version=1, **changes)


def shown(*members: MemberExperts, layer: int | None = None, width: int = 100, coloured: bool = False,
          without: dict[str, str] | None = None) -> str:
    console = Console(width=width, record=True, soft_wrap=True, file=io.StringIO())
    console.print(render(ExpertsResponse(list(members), without or {}), layer, width, coloured=coloured))
    return console.export_text()


def line_of(text: str, start: str) -> str:
    return next(line for line in text.splitlines() if line.strip().startswith(start))


# ------------------------------------------------------------------------------- figures


def test_a_load_is_shown_against_the_mean_of_its_layer():
    assert relative_loads(member(), FIRST) == [2, 0.5, 0.5, 1]
    assert relative_loads(member(), LayerExperts([0] * 4, [0, 1, 2, 3, 3], [0, 0], [0, 0], 1.0, None)) == [0] * 4


def test_a_shared_expert_does_not_raise_the_mean():
    placed = member(num_experts=5)
    assert relative_loads(placed, LayerExperts([8, 2, 2, 4, 16], [], [], [], None, None)) == [2, 0.5, 0.5, 1, 4]


def test_a_narrow_terminal_shows_the_busiest_of_neighbours():
    assert fold([1, 5, 2, 2, 3], 3) == [5, 2, 3]
    assert fold([1, 5, 2], 8) == [1, 5, 2]


def test_lost_ranks_do_not_count_in_the_mean():
    assert rank_shares(member(), [[3, 1], [1, 3]]) == [1, 1]
    assert rank_shares(member(lost_ranks=[1]), [[3, 0], [1, 0]]) == [1, 0]
    assert worst([None, 1.5, 1.25]) == 1.5
    assert worst([None]) is None


# ------------------------------------------------------------------------------- the terminal


def test_the_heat_map_has_a_row_for_each_layer_and_its_balance():
    text = shown(member())
    assert line_of(text, "0 ") == "    0  ▓░░▒         1.25    1.50       1.50"
    assert line_of(text, "1 ") == "    1    ▓▒         1.25       -       1.25"
    assert line_of(text, "worst").split() == ["worst", "1.25", "1.50", "1.50"]
    for words in ("map 7", "200 steps counted", "3 experts moved (3.0 MiB)", "1 led to another placement"):
        assert words in text, words


def test_colours_stand_for_shades_where_there_are_any():
    assert not set(shown(member(), coloured=True)) & set("·░▒▓█")


def test_ranks_are_shown_with_what_moves_have_brought():
    lines = shown(member()).splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("rank"))
    assert lines[at + 1].split() == ["0", "3", "1.15", "1.35", "1.5", "s", "2.0", "KiB"]
    assert lines[at + 2].split() == ["1", "2", "0.85", "0.65", "-", "-"]


def test_what_is_wrong_is_said():
    text = shown(member(lost_ranks=[1], runnable=False, cause="rank 1 is gone", num_failures=2))
    for words in ("lost: rank 1", "in no slot", "last failure (2 in all): rank 1 is gone"):
        assert words in text, words
    assert "1 lost" in line_of(text, "1 lost")


def test_one_rank_has_loads_and_nothing_to_balance():
    text = shown(alone())
    assert line_of(text, "0 ").rstrip() == "    0  ▓░░▒"
    assert "nothing to balance" in text and "max/mean" not in text


def test_before_any_step_nothing_is_drawn():
    text = shown(member(num_steps=0))
    assert "no step has been counted yet" in text and "max/mean" not in text


def test_wide_layers_are_folded_to_the_terminals_width():
    loads = [1.0] * 255 + [9.0]
    layer = LayerExperts(loads, list(range(256)) + [255], [100, 164], [100, 164], 1.24, None)
    wide = member(num_experts=256, num_routed=256, slots_per_rank=[129, 128], layers=[layer])
    text = shown(wide, width=80)
    assert "a column is 6 experts" in text
    assert line_of(text, "0 ").split()[1].endswith("█")
    assert len(line_of(text, "0 ")) <= 80


def test_one_layer_is_shown_closely():
    text = shown(member(), layer=0)
    assert line_of(text, "0  ").split()[:3] == ["0", "10.00", "12.00"]
    hot = text[text.index("expert "):].splitlines()
    assert hot[1].split() == ["0", "8.00", "2.00", "0,", "1"]
    with pytest.raises(ConfigError, match="layers 0 to 1"):
        shown(member(), layer=2)


# ------------------------------------------------------------------------------- the command


def figures_served(*members: MemberExperts, without: dict[str, str] | None = None):
    """A server with these figures; it takes every rebalance."""
    page = msgspec.to_builtins(ExpertsResponse(list(members), without or {}))

    def script(path, body):
        if path == "/rebalance":
            return Script(body={"members": [each.member for each in members]})
        return Script(body=page) if path == "/experts" else Script(status=404, body={"error": {"message": "no"}})

    return fake_server_beside(script)


def test_the_command_shows_every_instance():
    with figures_served(member(), without={"decode-0": "it is loading: 30 %"}) as (url, _):
        done = tripool("experts", "--url", url)
    assert done.exit_code == 0, done.output
    assert "hybrid-0" in done.stdout and "decode-0: it is loading: 30 %" in done.stdout


def test_the_command_shows_one_instance_or_names_those_there_are():
    with figures_served(member(), member(member="hybrid-1")) as (url, _):
        assert "hybrid-0" not in tripool("experts", "--url", url, "--member", "hybrid-1").stdout
        done = tripool("experts", "--url", url, "--member", "decode-9")
    assert isinstance(done.exception, ConfigError)
    assert "there are hybrid-0, hybrid-1" in str(done.exception)


def test_the_command_speaks_json_to_other_programs():
    with figures_served(member()) as (url, _):
        page = json.loads(tripool("experts", "--url", url, "--json").stdout)
    assert page["members"][0]["layers"][0]["loads"] == [8, 2, 2, 4]


def test_an_operator_has_experts_spread_anew():
    with figures_served(member()) as (url, seen):
        done = tripool("experts", "--url", url, "--rebalance", "--api-key", "root", "--member", "hybrid-0")
    assert done.exit_code == 0, done.output
    assert seen.requests == [("/rebalance", {"member": "hybrid-0"}), ("/experts", None)]
    assert "Authorization: Bearer root" in seen.heads[0]
    assert "told to spread their experts anew: hybrid-0" in done.stderr


def test_a_refusal_is_told_in_the_servers_words():
    refusal = Script(status=403, body={"error": {"message": "set a key"}})
    with fake_server_beside(lambda path, body: refusal) as (url, _):
        done = tripool("experts", "--url", url)
    assert isinstance(done.exception, RequestError) and "403: set a key" in str(done.exception)


def test_a_picture_is_written(tmp_path):
    with figures_served(member(), alone(member="hybrid-1"), member(num_steps=0)) as (url, _):
        done = tripool("experts", "--url", url, "--png", str(tmp_path / "experts.png"))
    assert done.exit_code == 0, done.output
    with Image.open(tmp_path / "experts.png") as image:
        colours = {colour for _, colour in image.getcolors(1 << 20)}
        assert image.format == "PNG" and min(image.size) > 100
    assert (0xd7, 0x26, 0x3d) in colours and (0x1b, 0x2a, 0x49) in colours      # four times the mean, and nothing


def test_without_figures_there_is_no_picture(tmp_path):
    with figures_served(member(num_steps=0)) as (url, _):
        done = tripool("experts", "--url", url, "--png", str(tmp_path / "experts.png"))
    assert isinstance(done.exception, ConfigError) and "send it some requests" in str(done.exception)
    assert not (tmp_path / "experts.png").exists()


def test_a_picture_that_cannot_be_written_is_refused_at_once(tmp_path):
    done = tripool("experts", "--png", str(tmp_path / "absent" / "experts.png"))
    assert isinstance(done.exception, ConfigError) and "there is no folder" in str(done.exception)



def test_a_real_instance_tells_what_its_experts_do(tmp_path):
    with fleet.served(hybrid=1, instance={"ranks": 2, "redundant_experts": 2}) as served:
        for start in range(3):
            served.complete(list(range(start + 1, start + 60)), max_tokens=24)

        def counted() -> bool:
            members = served.http.get("/experts").json()["members"]
            return bool(members) and members[0]["num_steps"] > 0

        served.wait_for(counted)
        told = served.http.get("/experts").json()["members"][0]
        layer = told["layers"][0]
        assert sum(told["slots_per_rank"]) == told["num_experts"] + 2
        assert sum(layer["rank_loads"]) == pytest.approx(sum(layer["loads"]), rel=1e-2)
        assert sum(layer["loads"]) > 0 and len(layer["rank_loads"]) == 2
        assert all(counts["sent_bytes"] > 0 for counts in told["exchange"])

        done = tripool("experts", "--url", served.url, "--rebalance", "--png", str(tmp_path / "experts.png"))
        assert done.exit_code == 0, done.output
        assert "hybrid-0" in done.stdout and "max/mean" in done.stdout
        served.wait_for(lambda: served.http.get("/experts").json()["members"][0]["layers_planned"] > 0)

        page = served.http.get("/metrics").text
        for name in ("expert_map_version", "expert_load_max_over_mean", "num_live_ranks"):
            assert f"tripool:member_{name}{{" in page, name
        assert 'rank="1"' in page and "tripool:member_exchange_wait_seconds_total" in page
        assert "max/mean" in tripool("top", "--url", served.url, "--once").stdout
