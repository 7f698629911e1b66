# SPDX-License-Identifier: Apache-2.0

"""Bodies with the keys that Blazar 18 reads, sent to a real nova-api.

For each key there are values that Blazar's plug-ins accept and values that
they refuse. A body of accepted values gets a lease, or is refused for
capacity; no body is answered with a 5xx.
"""

import hypothesis
from hypothesis import strategies as st
import requests

from tests import examples
from tests.functional import api_base

HOUR = 3600

#: By resource type and key: values that Blazar accepts, and values that it
#: refuses or fails on.
_COUNTS = [1, 2, '1', '2'], [0, -1, '', 'x', 1.5, [], {}, '9' * 99, None]
_PROPERTIES = ['', '[]', '[">=", "$vcpus", "2"]', '["==", "$vcpus", 4]'], [
    '[', '["=", "$vcpus"]', 'vcpus', 7, {'a': 1}, '[">", "$\0", "1"]']
_AFFINITIES = ['None', None, 'True', True, 'False', False], [
    'x', 2, [], {'a': 1}]
_BEFORE_END = ['', 'default', 'snapshot'], ['email2', 7, []]
_SIZES = [1, 2, '1'], [-1, 'x', None, 2 ** 70, {}]
KEYS = {
    'physical:host': {
        'min': _COUNTS, 'max': _COUNTS, 'hypervisor_properties': _PROPERTIES,
        'resource_properties': _PROPERTIES, 'before_end': _BEFORE_END},
    'virtual:instance': {
        'vcpus': _SIZES, 'memory_mb': _SIZES, 'disk_gb': _SIZES,
        'amount': _COUNTS, 'affinity': _AFFINITIES,
        'resource_properties': _PROPERTIES},
    'flavor:instance': {
        'flavor_id': (['1', '2', 1], ['x', '', None, [], '\0', 'a' * 300]),
        'amount': _COUNTS, 'affinity': _AFFINITIES},
    'virtual:floatingip': {
        'network_id': (['a' * 36], [None, 7]), 'amount': _COUNTS,
        'required_floatingips': ([[], ['10.0.0.5']], ['x', 7])},
}
#: The keys of a lease that Blazar reads apart from its dates and
#: reservations, and those that its clients send back.
LEASE = {
    'name': (['lease1', 'x' * 80], ['', None, 7, [], '\0', 'x' * 300]),
    'status': (['ACTIVE'], [7]), 'trust_id': (['a' * 32], [7]),
    'id': (['2bb8720a-0873-4d97-babf-0d906851a1eb'], [7]),
    'user_id': (['a' * 32], [7]), 'project_id': (['a' * 32], [7]),
    'degraded': ([False], ['x']),
}
#: Dates of a lease in seconds from now: past, present, or out of order.
DATES = st.sampled_from([-9 * HOUR, 0, HOUR, 2 * HOUR, 3 * HOUR, None])


def values(keys):
    """Return a strategy of objects with accepted values of all keys."""
    return st.fixed_dictionaries({
        key: st.sampled_from(accepted)
        for key, (accepted, _refused) in keys.items()})


@st.composite
def spoilt(draw, keys):
    """Draw the same with some keys refused or missing."""
    found = draw(values(keys))
    for key in draw(st.sets(st.sampled_from(sorted(keys)), max_size=2)):
        del found[key]
        if draw(st.booleans()):
            found[key] = draw(st.sampled_from(keys[key][1]))
    return found


def reservations(of):
    """Return a strategy of one or two reservations in Blazar's form."""
    return st.lists(st.one_of(*(
        of(keys).map(lambda found, name=name: {
            'resource_type': name, **found})
        for name, keys in KEYS.items())), min_size=1, max_size=2)


class TestBlazarBodies(api_base.ApiTestCase):

    def date(self, seconds):
        return seconds if seconds is None else self.at(seconds)

    def send(self, method, path, body, *codes):
        """Send a body; return the lease in the answer, if there is one."""
        url = self.alice.base_url.rsplit('/v2', 1)[0] + '/reservation/v1'
        answer = requests.request(
            method, url + path, json=body,
            headers={'X-Auth-Token': self.alice.who.token()})
        self.assertIn(answer.status_code, codes,
                      f'{method} {path} {body}: {answer.text}')
        if answer.ok:
            return answer.json()['lease']
        self.assertEqual(
            {'error_code', 'error_message', 'error_name'},
            answer.json().keys() & {'error_code', 'error_message',
                                    'error_name'}, answer.text)
        return None

    def post(self, body, *codes):
        """Create a lease and delete it, so that the next one fits."""
        lease = self.send('POST', '/leases', body, *codes)
        if lease is not None:
            self.ask('DELETE', f'/leases/{lease["id"]}', code=204)
        return lease

    @examples.repeatable(40)
    @hypothesis.given(reservations(values).filter(lambda found: all(
        one['resource_type'] != 'virtual:floatingip' and
        int(one.get('min', 1)) <= int(one.get('max', 1)) for one in found)),
        st.booleans())
    def test_bodies_accepted_by_blazar_are_accepted(self, asked, has_events):
        self.post({'name': 'lease1', 'start_date': self.at(HOUR),
                   'end_date': self.at(4 * HOUR), 'reservations': asked,
                   **({'events': []} if has_events else {})}, 201, 409)

    @examples.repeatable(80)
    @hypothesis.given(reservations(spoilt), spoilt(LEASE), DATES, DATES,
                      DATES)
    def test_create_never_answers_5xx(self, asked, lease, start, end, before):
        self.post({**lease, 'reservations': asked,
                   'start_date': self.date(start), 'end_date': self.date(end),
                   'before_end_date': self.date(before)},
                  201, 400, 403, 404, 409)

    @examples.repeatable(60)
    @hypothesis.given(
        st.sampled_from(['virtual:instance', 'flavor:instance']).flatmap(
            lambda name: st.tuples(st.just(name), spoilt(KEYS[name]))),
        spoilt(LEASE), DATES, DATES, st.booleans())
    def test_update_never_answers_5xx(self, asked, lease, start, end, whole):
        name, changed = asked
        made = self.make(start_in=HOUR, reservations=[{
            'resource_type': name, 'flavor_id': '1', 'amount': 1} if (
                name == 'flavor:instance') else self.reservation()])
        one, = made['reservations']
        # Clients send back what they have read, with their changes.
        body = {**(made if whole else {}), **lease, 'reservations': [
            {**(one if whole else {'id': one['id']}), **changed}]}
        for key, seconds in (('start_date', start), ('end_date', end)):
            if seconds is not None:
                body[key] = self.at(seconds)
        self.send('PUT', f'/leases/{made["id"]}', body,
                  200, 400, 403, 404, 409)
        self.ask('DELETE', f'/leases/{made["id"]}', code=204)

    def test_update_accepts_lease_as_read(self):
        for one in ({'resource_type': 'flavor:instance', 'flavor_id': '1',
                     'amount': 1}, self.reservation()):
            made = self.make(start_in=HOUR, reservations=[one])
            found = self.send('PUT', f'/leases/{made["id"]}', made, 200)
            for key in ('start_date', 'end_date', 'name'):
                self.assertEqual(made[key], found[key])
