from __future__ import annotations

from tests.web.console.stage import Stage


def test_smoke(stage: Stage) -> None:
    ids = stage.each_phase()
    c = stage.client("SUPER_ADMIN")
    for a in [
        "/console/jobs",
        "/console/jobs/chips",
        "/console/jobs/changes?ids=" + ids["running"],
        "/console/outbox",
        "/console/outbox/changes",
        "/console/queues",
        "/console/workers",
    ]:
        r = c.get(a)
        print(a, r.status_code, len(r.text))
        assert r.status_code == 200
    for p, i in ids.items():
        for s in ("", "/changes", "/retry", "/cancel"):
            r = c.get(f"/console/jobs/{i}{s}")
            print(p, s, r.status_code)
            assert r.status_code == 200, r.text[:800]
        assert f'data-state="{p}"' in c.get(f"/console/jobs/{i}").text, p
