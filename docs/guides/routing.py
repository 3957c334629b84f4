"""The numbers of docs/guides/routing.md.

python docs/guides/routing.py
"""

import torch
from drawing import guide, line, rect, svg, text

EXPERTS, TOP_K, TOKENS, STEPS = 8, 2, 512, 200
RATE = 0.01
DEVICES = 4  # of two consecutive experts


def scores(step):
    """Return sigmoid affinities [tokens, experts]: some experts are liked more, as happens in training."""
    generator = torch.Generator().manual_seed(step)
    liked = torch.linspace(0.6, -0.6, EXPERTS)
    return torch.sigmoid(torch.randn(TOKENS, EXPERTS, generator=generator) + liked)


def route(affinity, bias):
    """Return the experts and weights of each token: the bias chooses, and weighs nothing."""
    chosen = (affinity + bias).topk(TOP_K, dim=-1).indices
    weights = affinity.gather(-1, chosen)
    return chosen, weights / weights.sum(-1, keepdim=True)


def load_of(chosen):
    """Return tokens of each expert over the mean."""
    return torch.bincount(chosen.flatten(), minlength=EXPERTS) / (TOKENS * TOP_K / EXPERTS)


def trained(rate):
    """Return the busiest expert's load in each step, the last bias, and the mean load of 20 steps."""
    bias, worst, loads = torch.zeros(EXPERTS), [], []
    for step in range(STEPS):
        load = load_of(route(scores(step), bias)[0])
        bias += rate * torch.sign(1 - load)  # V3: up where there were too few, down where too many
        worst.append(load.max().item())
        loads.append(load)
    return worst, bias, torch.stack(loads[-20:]).mean(0)


def sequence_loss(affinity):
    """Return the sum over experts of f P, f of the best by bare score.

    Source: DeepSeek-V3, equations 17 to 20.
    """
    f = load_of(affinity.topk(TOP_K, dim=-1).indices)
    return (f * (affinity / affinity.sum(-1, keepdim=True)).mean(0)).sum().item()


def device_loss(affinity):
    """Return the sum over devices of their mean f times their summed P.

    Source: DeepSeek-V2, equations 26 to 28.
    """
    probabilities = affinity / affinity.sum(-1, keepdim=True)
    f = load_of(probabilities.topk(TOP_K, dim=-1).indices).view(DEVICES, -1).mean(1)
    return (f * probabilities.mean(0).view(DEVICES, -1).sum(1)).sum().item()


def cases():
    """Return affinities [tokens, experts]: all alike, uneven within devices, and one pair for all."""
    token = torch.arange(TOKENS)
    even = torch.full((TOKENS, EXPERTS), 0.01)
    even[token, token % 8] = even[token, (token + 1) % 8] = 0.9
    uneven = torch.full((TOKENS, EXPERTS), 0.01)
    uneven[token, token % 4 * 2] = uneven[token, (token + 1) % 4 * 2] = 0.9
    pair = torch.full((TOKENS, EXPERTS), 0.01)
    pair[:, :2] = 0.9
    return {"every expert alike": even, "one expert of each device": uneven, "two experts for all": pair}


def numbers(row):
    return " ".join(f"{each:.2f}" for each in row)


def main():
    affinity = scores(0)
    chosen, weights = route(affinity, torch.zeros(EXPERTS))
    print("token 0, affinities:", numbers(affinity[0]))
    print("goes to experts", *chosen[0].tolist(), "with weights", numbers(weights[0]))
    (worst, _, load), (balanced, bias, even) = trained(0.0), trained(RATE)
    print(f"load without a bias: {numbers(load)}; the busiest {sum(worst[-20:]) / 20:.2f}")
    print(f"load with a bias:    {numbers(even)}; the busiest {sum(balanced[-20:]) / 20:.2f}")
    print("the bias after 200 steps:", " ".join(f"{each:+.2f}" for each in bias))
    print("\nloss                       sequence  device")
    for name, each in cases().items():
        print(f"{name:27}{sequence_loss(each):<10.2f}{device_loss(each):.2f}")


def pictures():
    parts = []
    (without, _, load), (with_bias, _, even) = trained(0.0), trained(RATE)
    for left, name, loads in ((0, "tokens of each expert, without a bias", load), (260, "with a bias", even)):
        parts.append(text(left, 14, name))
        for expert, each in enumerate(loads.tolist()):
            high = each * 60
            parts.append(rect(left + expert * 26, 150 - high, 22, high, f"c{expert // 2}"))
            parts.append(text(left + expert * 26 + 11, 164, str(expert), "middle"))
        parts.append(line(((left, 90), (left + 206, 90)), "s1"))
    parts.append(text(520, 14, "the busiest over the mean, by step"))
    for kind, curve in (("s0", without), ("s2", with_bias)):
        points = [(520 + step, 150 - (each - 1) * 120) for step, each in enumerate(curve)]
        parts.append(line(points[::4], kind))
    parts.append(text(724, 60, "without"))
    parts.append(text(724, 146, "with a bias"))
    return {"routing": svg(800, 172, parts, "A bias that follows the load evens it out")}


if __name__ == "__main__":
    guide(main, pictures)
