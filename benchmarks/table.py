"""The figures of `powersgd_step` as the README's tables, and whether they reach what was promised."""

from collections.abc import Iterable
from typing import Any

Line = dict[str, Any]
Key = tuple[str, int | None]

HOOKS = {
    "ddp": "DDP",
    "noop": "no reduction",
    "bf16": "DDP in bf16",
    "torch": "torch's PowerSGD",
    "powersgd": "**PowerSGD**",
    "acp_sgd": "**ACP-SGD**",
}
# what PowerSGD must reach on the mlp
AT_MOST = 0.35
FASTER = {"1gbit": 3.5, "200mbit": 10.0}


def table(lines: list[Line]) -> str:
    """One Markdown table a model: a row a hook and rank, a column a figure; "-" where nothing was measured."""
    return "\n\n".join(_of_model(model, lines) for model in _unique(line["model"] for line in lines))


def targets(lines: list[Line]) -> str:
    """One line a promise: what was measured, what must be, whether it is."""
    verdicts = []
    for line in lines:
        what, r, network, value = (line[key] for key in ("figure", "matrix_approximation_rank", "network", "value"))
        if line["hook"] == "powersgd" and line["model"] == "mlp":
            if what.startswith("overhead") and network == "loopback" and r in (1, 4):
                verdicts.append((line, "at most", AT_MOST, value <= AT_MOST))
            if what == "speed_up_over_ddp" and network in FASTER and r == 1:
                verdicts.append((line, "at least", FASTER[network], value >= FASTER[network]))
        if what == "speed_up_over_powersgd" and network in FASTER:
            verdicts.append((line, "at least", 1.0, value >= 1))
    return "\n".join(
        f"{'met   ' if met else 'MISSED'} {line['model']} on {line['network']}, {line['hook']} r="
        f"{line['matrix_approximation_rank']}: {line['figure']} {line['value']:.2f}, must be {bound} {wanted}"
        for line, bound, wanted, met in verdicts
    )


def _of_model(model: str, lines: list[Line]) -> str:
    lines = [line for line in lines if line["model"] == model]
    networks = _unique(line["network"] for line in lines)
    cells = {(_key(line), line["network"], line["figure"]): line["value"] for line in lines}

    def cell(key: Key, network: str, figure: str, form: str = "{:.0f}", scale: float = 1.0) -> str:
        value = cells.get((key, network, figure))
        return "-" if value is None else form.format(value / scale)

    first = networks[0]
    slow = [network for network in networks if network != "loopback"]
    head = ["hook", "r", "processor ms", *(f"step ms, {network}" for network in networks)]
    head += [f"x DDP, {network}" for network in slow]
    head += ["kB sent: ledger", "device", "overhead / torch's: processor", "clock"]
    rows = [head, ["---"] * 2 + ["---:"] * (len(head) - 2)]
    for key in _unique(_key(line) for line in lines):
        hook, r = key
        row = [HOOKS[hook], str(r or "-"), cell(key, first, "processor_time")]
        row += [cell(key, network, "step") for network in networks]
        row += [cell(key, network, "speed_up_over_ddp", "{:.1f}") for network in slow]
        row += [cell(key, first, "ledger_bytes", "{:.0f}", 1e3), cell(key, networks[-1], "device_bytes", "{:.0f}", 1e3)]
        row += [cell(key, first, f"overhead_{what}", "{:.2f}") for what in ("processor_time", "clock")]
        rows.append(row)
    return f"{model}\n\n" + "\n".join("| " + " | ".join(row) + " |" for row in rows)


def _key(line: Line) -> Key:
    return line["hook"], line["matrix_approximation_rank"]


def _unique(values: Iterable[Any]) -> list[Any]:
    return list(dict.fromkeys(values))
