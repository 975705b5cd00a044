"""What others report of their procedure: Musique on one Ascend 910B4."""

from benchmarks.report import Row

F1, SECONDS = "share", "s"
FIGURES: list[tuple[str, str, tuple[float, float], str]] = [
    ("f1_0_holes_50", "no hole, ratio 0.5: F1 of pass 1 and pass 2", (0.352, 0.366), F1),
    ("e2e_0_holes_50", "no hole, ratio 0.5: end to end of pass 1 and pass 2", (0.947, 0.772), SECONDS),
    ("f1_1_hole_50", "one hole, ratio 0.5: F1, by where it stands", (0.329, 0.339), F1),
    ("e2e_1_hole_50", "one hole, ratio 0.5: end to end, by where it stands", (0.931, 0.985), SECONDS),
    ("f1_2_holes_50", "two holes, ratio 0.5: F1", (0.345, 0.345), F1),
    ("e2e_2_holes_50", "two holes, ratio 0.5: end to end", (1.019, 1.019), SECONDS),
    ("f1_30", "ratio 0.3: F1, both figures that were published", (0.340, 0.304), F1),
]


def rows() -> list[Row]:
    return [
        Row(
            f"published_{id}",
            f"published: {what}",
            figures[0],
            unit,
            None,
            "higher" if unit == F1 else "lower",
            None,
            (min(figures), max(figures)),
        )
        for id, what, figures, unit in FIGURES
    ]
