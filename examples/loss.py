"""A policy loss: PPO's, with other bounds for falling than for rising probabilities.

algorithm:
  loss: loss:asymmetric_clip
  loss_options: {down: 0.1}
"""


def asymmetric_clip(tokens, config, down: float = 0.2, up: float = 0.28):
    """PPO that limits the decrease of a token's probability more than its increase."""
    ratio = tokens.log_ratio.clamp(-20, 20).exp()
    bounded = ratio.clamp(1 - down, 1 + up)
    losses = -(tokens.advantages * ratio).minimum(tokens.advantages * bounded)
    return losses, {"clipped": ratio != bounded}
