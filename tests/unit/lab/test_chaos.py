from lab import chaos_verdict as verdict


def line(at, kind="round", **more):
    return {
        "kind": kind,
        "at": at,
        "step": 6,
        "stall_s": 0.05,
        "members": [0, 1, 2],
        "reason": "",
        "digest": "a",
    } | more


def event(what, who="worker-2", at=10.0, seconds=2.0):
    return {"at": at, "who": who, "what": what, "seconds": seconds}


def end(digest="d", loss=2.0):
    return {"kind": "end", "at": 99.0, "digest": digest, "loss": loss, "taken": 6}


class TestMatch:
    def test_a_round_without_the_worker_is_how_its_death_was_seen(self):
        said = {"worker-0": [line(9.0), line(11.0, step=12, members=[0, 1], stall_s=0.7)]}
        said["worker-2"] = [line(9.0), {"kind": "joined", "at": 12.5, "step": 18}]
        found = verdict.match(event("kill"), said)
        assert found == {"seen": "left out", "step": 12, "stall_s": 0.7, "back_s": 0.5}

    def test_nothing_is_seen_of_a_stop_between_two_rounds(self):
        found = verdict.match(event("stop"), {"worker-0": [line(9.0), line(11.0)], "worker-2": [line(15.0)]})
        assert found["seen"] == "between rounds"

    def test_a_poisoned_contribution_must_be_named(self):
        told = line(11.0, reason="the contribution of worker 2 was left out")
        said = {"worker-0": [told], "worker-2": [{"kind": "poisoned", "at": 10.1, "step": 4}]}
        assert verdict.match(event("poison"), said)["seen"] == "contribution left out"
        assert verdict.match(event("poison"), said | {"worker-0": [line(11.0)]})["seen"] == "thrown away"

    def test_rounds_that_fail_are_what_is_seen_of_the_store(self):
        failed = line(11.0, "failed", reason="the store cannot be reached", members=[])
        assert verdict.match(event("store", "store"), {"worker-0": [failed]})["seen"] == "rounds skipped"

    def test_who_is_in_trouble_itself_says_nothing_of_what_others_cost(self):
        said = {"worker-0": [line(11.0)], "worker-1": [line(11.0, stall_s=9.0)]}
        assert verdict.match(event("stop"), said, troubled={"worker-1": [(8.0, 9.0)]})["stall_s"] == 0.05


class TestSummary:
    def test_rounds_after_which_the_bits_differ_are_found(self):
        said = {"worker-0": [line(1.0), line(2.0, step=12), end()], "worker-1": [line(1.0, digest="b"), end()]}
        assert verdict.summary(said)["disagreeing_steps"] == [6]

    def test_a_worker_that_did_not_come_to_its_end_has_no_loss(self):
        said = {"worker-0": [line(1.0), end()], "worker-1": [line(1.0)]}
        found = {"events": [], "all_ended": False, **verdict.summary(said)}
        judged = verdict.judge(found, found)
        assert not judged["agree_to_the_bit"]
        assert not judged["good"]
