"""Reinforcement learning that reads values in the middle of a step: the KL divergence decides
whether to go on, and the entropy is logged.

A cart on a line must be moved to the middle and stopped; 256 carts run at once. PPO updates the
policy on all their steps as one batch.

    python examples/reinforce.py [--rounds 30]
"""

import argparse

import torch
from torch import nn

import koila
from koila import lazy

N, T = 256, 24


def rollout(policy, generator):
    """One episode of every cart: observations, actions, their log probabilities, returns to go."""
    position, speed = 4 * torch.rand(N, generator=generator) - 2, torch.zeros(N)
    observations, actions, logps, rewards = [], [], [], []
    for _ in range(T):
        seen = torch.stack([position, speed, position.abs(), speed.abs()], 1)
        with torch.no_grad():
            choice = torch.distributions.Categorical(logits=policy(seen)[:, :3])
            action = torch.multinomial(choice.probs, 1, generator=generator)[:, 0]
        speed = (0.95 * speed + 0.2 * (action - 1)).clamp(-1, 1)
        position = position + 0.5 * speed
        observations.append(seen)
        actions.append(action)
        logps.append(choice.log_prob(action))
        rewards.append(-position.abs() - 0.1 * speed.abs())
    returns, after = [], torch.zeros(N)
    for r in reversed(rewards):
        after = r + 0.9 * after
        returns.insert(0, after)
    return [torch.cat(v) for v in (observations, actions, logps, returns)], torch.stack(
        rewards
    ).mean().item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=30)
    args = parser.parse_args()
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    policy = nn.Sequential(
        nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 4)
    )
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
    history, stopped = [], 0
    with koila.micro_batch(1024):
        for k in range(args.rounds):
            batch, reward = rollout(policy, generator)
            history.append(reward)
            for _ in range(6):
                seen, action, old, returns = lazy(*batch)  # the only line added
                out = policy(seen)
                choice = torch.distributions.Categorical(logits=out[:, :3])
                value, logp = out[:, 3], choice.log_prob(action)
                kl = (old - logp).mean()
                if kl > 0.03:  # a Python value of a batch that has not run yet
                    stopped += 1
                    break
                advantage = returns - value.detach()
                advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-6)
                ratio = (logp - old).exp()
                clipped = torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
                entropy = choice.entropy().mean()
                loss = -clipped.mean() + 0.05 * (value - returns).square().mean() - 0.003 * entropy
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            if k % 10 == 0 or k == args.rounds - 1:
                print(
                    f"round {k:3}  reward {reward:.3f}  entropy {entropy.item():.3f}  kl "
                    f"{kl.item():.4f}"
                )
    print(koila.last_plan())
    print(f"stopped early {stopped} times")
    assert args.rounds < 30 or history[-1] > history[0] + 0.3, "it did not learn"


if __name__ == "__main__":
    main()
