"""
Draws the picture of the four models in README: one iteration of PPO.

    python assets/models.py > assets/models.svg
"""
W, H = 900, 400
TRAINED, FROZEN, DATA = "#cfe3f7", "#e8e8e8", "#ffffff"
parts = []


def box(x, y, w, h, lines, fill):
    """A rectangle with lines of text: the first is bold. Data has round corners."""
    parts.append(f'<rect x="{x}" y="{y}" width="{w}" height="{h}" rx="{14 if fill == DATA else 3}"'
                 f' fill="{fill}" stroke="#555"/>')
    for i, line in enumerate(lines):
        weight, small = ' font-weight="bold"' if i == 0 else "", ' font-size="12"'
        top = y + h / 2 + 5 + 17 * (i - (len(lines) - 1) / 2)
        parts.append(f'<text x="{x + w / 2}" y="{top:g}" text-anchor="middle"{weight or small}>'
                     f'{line}</text>')


def arrow(*points, words="", dashed=False):
    """A line through points, with a head at its end, and words above its first part."""
    way = "M" + "L".join(f"{x} {y}" for x, y in points)
    dash = ' stroke-dasharray="6 4"' if dashed else ""
    parts.append(f'<path d="{way}" fill="none" stroke="#555" marker-end="url(#head)"{dash}/>')
    if words:
        (x0, y0), (x1, _) = points[:2]
        parts.append(f'<text x="{(x0 + x1) / 2}" y="{y0 - 6}" text-anchor="middle" '
                     f'font-size="12">{words}</text>')


box(20, 170, 90, 50, ["prompts"], DATA)
box(150, 165, 120, 60, ["policy", "trained"], TRAINED)
box(310, 170, 110, 50, ["responses"], DATA)
arrow((110, 195), (150, 195))
arrow((270, 195), (310, 195))
for y, name, state, words in ((30, "reward_model", FROZEN, "scores"),
                              (120, "ref_policy", FROZEN, "ref_logprobs"),
                              (210, "policy", TRAINED, "logprobs"),
                              (300, "value_model", TRAINED, "values")):
    box(470, y, 130, 60, [name, "trained" if state == TRAINED else "frozen"], state)
    arrow((420, 195), (445, 195), (445, y + 30), (470, y + 30))
    arrow((600, y + 30), (690, y + 30), words=words)
box(690, 30, 190, 240, ["rewards", "a score on the last token,", "minus kl_coef times the KL",
                        "on each token"], DATA)
box(690, 290, 190, 80, ["advantages, returns", "GAE of rewards and values"], DATA)
arrow((785, 270), (785, 290))
arrow((785, 370), (785, 388), (210, 388), (210, 225), dashed=True)
arrow((535, 388), (535, 360), dashed=True)
parts.append('<text x="225" y="380" font-size="12">clipped steps on the policy and the value model'
             '</text>')
print(f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {W} {H}" '
      'font-family="system-ui, sans-serif" font-size="14">\n'
      '<title>One iteration of PPO: four models, what they read, and what is trained</title>\n'
      '<defs><marker id="head" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="8" '
      'markerHeight="8" orient="auto"><path d="M0 0L8 4L0 8z" fill="#555"/></marker></defs>\n'
      f'<rect width="{W}" height="{H}" fill="white"/>')
print("\n".join(parts))
print("</svg>")
