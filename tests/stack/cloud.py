# SPDX-License-Identifier: Apache-2.0

"""Users, catalog, flavors, quotas and an image, through the APIs."""

import typing as ty

import requests

from tests.stack import configuration

#: name -> (memory in MB, vcpus, disk in GB)
FLAVORS = {'m1.nano': (64, 1, 1), 'm1.tiny': (512, 1, 1),
           'm1.small': (2048, 1, 20), 'm1.medium': (4096, 2, 40),
           'm1.large': (8192, 4, 80)}
IMAGE = 'cirros'


class Api:
    """HTTP as one user.

    :raises requests.HTTPError: when an answer is not 2xx
    """

    def __init__(self, site: configuration.Site, user: str,
                 project: str) -> None:
        self.site = site
        self.session = requests.Session()
        keystone = site.endpoint('keystone') + '/v3'
        domain = {'id': 'default'}
        answer = self.session.post(f'{keystone}/auth/tokens', json={'auth': {
            'identity': {'methods': ['password'], 'password': {'user': {
                'name': user, 'domain': domain,
                'password': configuration.PASSWORD}}},
            'scope': {'project': {'name': project, 'domain': domain}}}})
        self._check(answer)
        self.session.headers['X-Auth-Token'] = answer.headers[
            'X-Subject-Token']

    def __call__(self, method: str, service: str, path: str,
                 **options: ty.Any) -> ty.Any:
        answer = self.session.request(
            method, self.site.endpoint(service) + path, **options)
        self._check(answer)
        return answer.json() if answer.content else None

    @staticmethod
    def _check(answer: requests.Response) -> None:
        if not answer.ok:
            raise requests.HTTPError(
                f'{answer.request.method} {answer.url}: '
                f'{answer.status_code} {answer.text[:500]}')


class Cloud:
    """What an administrator sets up in a new cloud."""

    def __init__(self, site: configuration.Site) -> None:
        self.site = site

    @property
    def _admin(self) -> Api:
        return Api(self.site, 'admin', 'admin')

    def accounts(self) -> None:
        """Projects, users and their roles, and the catalog."""
        api = self._admin
        roles = {role['name']: role['id'] for role in
                 api('GET', 'keystone', '/v3/roles')['roles']}
        projects: dict[str, str] = {}
        for user, (project, names) in configuration.ACCOUNTS.items():
            if project not in projects:
                projects[project] = self._create(
                    api, 'project', name=project, domain_id='default')
            user_id = self._create(
                api, 'user', name=user, password=configuration.PASSWORD,
                domain_id='default', default_project_id=projects[project])
            for name in names:
                api('PUT', 'keystone',
                    f'/v3/projects/{projects[project]}/users/{user_id}'
                    f'/roles/{roles[name]}')
        for kind, (name, port, path) in {
                **({'block-storage': ('cinder', 'cinder',
                                      '/v3/%(project_id)s')}
                   if 'cinder' in self.site.services else {}),
                **({'orchestration': ('heat', 'heat', '/v1/%(project_id)s')}
                   if 'heat' in self.site.services else {}),
                'placement': ('placement', 'placement', ''),
                'image': ('glance', 'glance', ''),
                'network': ('neutron', 'neutron', ''),
                'compute': ('nova', 'nova-api', '/v2.1'),
                'reservation': ('blazar', 'nova-api', '/reservation/v1'),
        }.items():
            service = self._create(api, 'service', name=name, type=kind)
            for interface in ('public', 'internal'):
                self._create(api, 'endpoint', service_id=service,
                             interface=interface,
                             region_id=configuration.REGION,
                             url=self.site.endpoint(port) + path)

    @staticmethod
    def _create(api: Api, kind: str, **values: str) -> str:
        made = api('POST', 'keystone', f'/v3/{kind}s', json={kind: values})
        return ty.cast(str, made[kind]['id'])

    def image(self) -> None:
        """A disk of one megabyte without anything on it."""
        api = self._admin
        image = api('POST', 'glance', '/v2/images', json={
            'name': IMAGE, 'disk_format': 'raw', 'container_format': 'bare',
            'visibility': 'public'})
        api('PUT', 'glance', f'/v2/images/{image["id"]}/file',
            data=bytes(2 ** 20),
            headers={'Content-Type': 'application/octet-stream'})

    def compute(self) -> None:
        """Flavors, and no limits for the project demo."""
        api = self._admin
        for name, (ram, vcpus, disk) in FLAVORS.items():
            api('POST', 'nova-api', '/v2.1/flavors', json={'flavor': {
                'name': name, 'ram': ram, 'vcpus': vcpus, 'disk': disk}})
        projects = api('GET', 'keystone', '/v3/projects?name=demo')
        api('PUT', 'nova-api',
            f'/v2.1/os-quota-sets/{projects["projects"][0]["id"]}',
            json={'quota_set': {
                'instances': -1, 'cores': -1, 'ram': -1, 'key_pairs': -1,
                'server_groups': -1, 'server_group_members': -1,
                'force': True}})
