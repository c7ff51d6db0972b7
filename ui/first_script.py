"""A script that runs before Gradio's own: ``launch(head=…)`` comes after them."""

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send


class FirstScript:
    """ASGI middleware that puts ``script`` at the beginning of the page's head; all else goes through as it is."""

    def __init__(self, app: ASGIApp, script: str) -> None:
        self._app = app
        self._tag = f"<head><script>{script}</script>".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer the page's own address with the script in it."""
        if scope["type"] != "http" or scope["method"] != "GET" or scope["path"] != f"{scope.get('root_path', '')}/":
            await self._app(scope, receive, send)
            return
        begun: list[Message] = []
        body = b""

        async def send_page(message: Message) -> None:
            nonlocal body
            if message["type"] == "http.response.start":
                begun.append(message)
                return
            body += message.get("body", b"")
            if message.get("more_body"):
                return
            page = body.replace(b"<head>", self._tag, 1)
            MutableHeaders(scope=begun[0])["content-length"] = str(len(page))
            await send(begun[0])
            await send({"type": "http.response.body", "body": page})

        await self._app(scope, receive, send_page)
