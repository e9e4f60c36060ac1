"""F13: the server forgets its scripts, or refuses the user for a while."""

from __future__ import annotations

import pytest

from faults.figures import keep
from faults.load import Load
from faults.scene import Scene, pause

NAME, PASSWORD = "app", "first"


@pytest.mark.parametrize(
    ("times", "seconds"),
    [
        pytest.param(1, 0.3, id="quick"),
        pytest.param(5, 3.0, id="long", marks=[pytest.mark.slow, pytest.mark.timeout(240)]),
    ],
)
async def test_scripts_rights_and_passwords_may_go_and_come_back(times: int, seconds: float) -> None:
    slowest_s = {"scripts": 0.0, "rights": 0.0, "password": 0.0}
    async with Scene(login=f"{NAME}:{PASSWORD}") as scene:
        command = scene.server._command
        url = scene.client_line.url.replace("://", f"://{NAME}:{PASSWORD}@")
        async with Load(url) as load:
            for _ in range(times):
                for _ in range(5):
                    await command("SCRIPT", "FLUSH")
                    slowest_s["scripts"] = max(slowest_s["scripts"], await load.served())

                await command("ACL", "SETUSER", NAME, "-@scripting", "-@stream", "-@pubsub")
                await pause(seconds)
                await command("ACL", "SETUSER", NAME, "+@all")
                slowest_s["rights"] = max(slowest_s["rights"], await load.served())

                await command("ACL", "SETUSER", NAME, "resetpass", ">second")
                await command("CLIENT", "KILL", "USER", NAME)
                await pause(seconds)
                await command("ACL", "SETUSER", NAME, f">{PASSWORD}")
                slowest_s["password"] = max(slowest_s["password"], await load.served())
        account = await load.account(scene.broker)
        noticed = sum(hired.metric("broker_reconnects_total") for hired in scene.workers)
    for what, found_s in slowest_s.items():
        keep(
            f"F13 {what}, {times} times",
            {
                "scripts": "SCRIPT FLUSH under load",
                "rights": f"the user's rights taken for {seconds:g} s under load",
                "password": f"the password changed and all connections cut, mended after {seconds:g} s",
            }[what],
            f"answers at most {found_s:.2f} s after the mend",
            "within 5 s",
        )
    keep(f"F13 {times} times", "the requests under all of these", str(account), "0 lost, 0 doubled")
    assert noticed > 0, "nobody was refused"
    assert account.is_whole(), account
    assert set(account.states) == {"done"}
