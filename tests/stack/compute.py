# SPDX-License-Identifier: Apache-2.0

"""nova-compute with guests that exist only as records.

python -m tests.stack.compute HOST[,HOST...] ARGUMENT OF NOVA-COMPUTE...

One process may serve several hosts. Nova's fake driver has its guests in
memory; this one writes them into files too, since real guests outlive the
nova-compute that has created them. In ``[DEFAULT] instances_path``:

``HOST/SERVER.json``
    An existing guest, with all its parameters.
``HOST/spawned.jsonl``
    One line for each guest that was ever created there; it shows if a server
    got two guests.
"""

from nova import monkey_patch

monkey_patch.patch(backend='threading')

import base64  # noqa: E402
import glob  # noqa: E402
import io  # noqa: E402
import json  # noqa: E402
import os  # noqa: E402
import shlex  # noqa: E402
import signal  # noqa: E402
import sys  # noqa: E402
import threading  # noqa: E402
import typing as ty  # noqa: E402
import uuid  # noqa: E402

from nova.cmd import compute as nova_compute  # noqa: E402
from nova.compute import power_state  # noqa: E402
from nova.compute import rpcapi as compute_rpcapi  # noqa: E402
from nova.conductor import rpcapi as conductor_rpcapi  # noqa: E402
import nova.conf  # noqa: E402
from nova import config  # noqa: E402
import nova.db.main.api  # noqa: E402
from nova.image import glance  # noqa: E402
from nova import objects  # noqa: E402
from nova.objects import base as objects_base  # noqa: E402
from nova import service  # noqa: E402
from nova import utils  # noqa: E402
from nova.virt import fake  # noqa: E402
import os_vif  # noqa: E402
from oslo_log import log as logging  # noqa: E402
from oslo_privsep import priv_context  # noqa: E402
from oslo_service import opts as service_opts  # noqa: E402

#: Two servers of the flavor m1.large fill a host.
VCPUS, MEMORY_MB, DISK_GB = 8, 16384, 160
#: The namespace of host ids, which are the same after each start.
NAMESPACE = uuid.UUID('0d3f2c52-5d5c-4f0e-9c9e-b1a2a7d0c0de')

CONF = nova.conf.CONF


class Guests(dict[str, fake.FakeInstance]):
    """The guests of one host by their servers' ids, in files too."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        os.makedirs(folder, exist_ok=True)
        for path in glob.glob(os.path.join(folder, '*.json')):
            with open(path) as file:
                guest = json.load(file)
            # The power state is not recorded; Nova corrects it.
            super().__setitem__(guest['uuid'], fake.FakeInstance(
                guest['name'], power_state.RUNNING, guest['uuid']))

    def record(self, guest: dict[str, ty.Any]) -> None:
        """Record a guest before its creation."""
        text = json.dumps(guest)
        with open(os.path.join(self.folder, 'spawned.jsonl'), 'a') as file:
            file.write(text + '\n')
        with open(self._path(guest['uuid']), 'w') as file:
            file.write(text)

    def __setitem__(self, key: str, guest: fake.FakeInstance) -> None:
        super().__setitem__(key, guest)
        if not os.path.exists(self._path(key)):
            # A migrated guest, or one whose deletion was reverted.
            with open(self._path(key), 'w') as file:
                json.dump({'uuid': key, 'name': guest.name}, file)

    def __delitem__(self, key: str) -> None:
        super().__delitem__(key)
        os.remove(self._path(key))

    def _path(self, key: str) -> str:
        return os.path.join(self.folder, f'{key}.json')


class StackDriver(fake.FakeDriver):
    """Nova's fake driver, with guests that outlive it."""

    vcpus, memory_mb, local_gb = VCPUS, MEMORY_MB, DISK_GB

    def init_host(self, host: str) -> None:
        super().init_host(host)
        self.instances = Guests(os.path.join(CONF.instances_path, host))

    def get_available_resource(self, nodename: str) -> dict[str, ty.Any]:
        resources = super().get_available_resource(nodename)
        return resources | {'uuid': self._uuid(nodename)} if resources else {}

    def get_nodenames_by_uuid(self, refresh: bool = False) -> dict[str, str]:
        return {self._uuid(name): name for name in self.get_available_nodes()}

    @staticmethod
    def _uuid(nodename: str) -> str:
        return str(uuid.uuid5(NAMESPACE, nodename))

    def spawn(self, context: ty.Any, instance: ty.Any, image_meta: ty.Any,
              injected_files: ty.Any, admin_password: ty.Any,
              *args: ty.Any, **kwargs: ty.Any) -> None:
        self.instances.record({
            'uuid': instance.uuid, 'name': instance.name,
            'display_name': instance.display_name,
            'user_id': instance.user_id, 'project_id': instance.project_id,
            'request': {'user_id': context.user_id,
                        'project_id': context.project_id},
            'flavor': instance.flavor.name, 'image': instance.image_ref,
            'config_drive': bool(instance.config_drive),
            'user_data': instance.user_data,
            'metadata': dict(instance.metadata),
            'key_name': instance.key_name, 'key_data': instance.key_data,
            'availability_zone': instance.availability_zone,
            'injected_files': [
                [path, base64.b64encode(content).decode()
                 if isinstance(content, bytes) else content]
                for path, content in injected_files or ()],
            'admin_password': admin_password,
            # Fetched with the user's token, as real drivers do.
            'image_bytes': sum(map(len, glance.API().download(
                context, instance.image_ref)))})
        super().spawn(context, instance, image_meta, injected_files,
                      admin_password, *args, **kwargs)

    def post_live_migration(self, context: ty.Any, instance: ty.Any,
                            *args: ty.Any, **kwargs: ty.Any) -> None:
        # Nova's fake driver only creates the guest on the other host.
        self.destroy(context, instance, None)

    def snapshot(self, context: ty.Any, instance: ty.Any, image_id: str,
                 update_task_state: ty.Callable[..., None]) -> None:
        super().snapshot(context, instance, image_id, update_task_state)
        # Without data it could not be booted, as unshelving does.
        glance.API().update(
            context, image_id, {
                'disk_format': 'raw', 'container_format': 'bare'},
            io.BytesIO(b'snapshot'))


def serve_hosts(hosts: list[str]) -> None:
    """Do the work of nova.cmd.compute.main for several hosts."""
    config.parse_args(sys.argv)
    logging.setup(CONF, 'nova')
    service_opts.register_service_opts(CONF)
    priv_context.init(root_helper=shlex.split(utils.get_root_helper()))
    objects.register_all()
    os_vif.initialize()
    nova.db.main.api.DISABLE_DB_ACCESS = True
    objects_base.NovaObject.indirection_api = conductor_rpcapi.ConductorAPI()
    objects.Service.enable_min_version_cache()
    for host in hosts:
        # Some code reads the host from the service, and some from here.
        CONF.set_override('host', host)
        service.Service.create(
            host=host, binary='nova-compute', topic=compute_rpcapi.RPC_TOPIC,
            topic_alt=compute_rpcapi.RPC_TOPIC_ALT).start()
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_args: stop.set())
    stop.wait()
    # Threads of the services would continue: they end as in a crash.
    os._exit(0)


def main() -> None:
    hosts = sys.argv.pop(1).split(',')
    # Nova loads drivers from its own package only.
    fake.StackDriver = StackDriver
    if len(hosts) == 1:
        nova_compute.main()
    else:
        serve_hosts(hosts)


if __name__ == '__main__':
    main()
